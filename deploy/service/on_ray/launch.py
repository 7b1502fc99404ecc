"""Start the service on Ray Serve: on the cluster of a training job, or on a Ray of its own."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from actors.run_log import CHECKPOINTS
from deploy.errors import RunFailedError, UserError, reason, user_errors
from deploy.interrupts import terminated_by_sigterm, wait_for_interrupt
from deploy.machine import num_cpus, why_not_bindable
from deploy.ray_session import RaySession, ray_session, ray_token, registry_of_cluster
from deploy.service.example import example_request
from deploy.service.gateway.access import is_loopback
from deploy.service.gateway.keys import (
    KEYS_FILE_VARIABLE,
    TOKEN_FILE,
    TOKEN_VARIABLE,
    are_explicit,
    own_key,
    read_keys,
)
from deploy.service.source import Address, Source
from deploy.wait_display import wait_display
from learner.model.checkpoint_files import checkpoint_chain, generation_defaults, max_float32_bytes, weight_files
from learner.parallel.timeouts import transfer_timeout_s

_READY_TIMEOUT_S = 180.0
_DRAIN_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 5.0
# Longer, because a busy machine must not hide where the service listens.
_ADDRESS_TIMEOUT_S = 30.0
_SCALE_TIMEOUT_S = 30.0
_POLL_S = 0.2
# From the end of the last answer in the ingress to its end in the proxy.
_FLUSH_S = 1.0
# Longer than clients' keep-alive, to avoid races.
_KEEP_ALIVE_S = 75
# Serve kills a proxy that is not ready in 5 s or does not answer for 10 s: too early on a busy machine.
_CONTROLLER_ENV = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30"}
_ENGINE, _INGRESS = "EngineReplica", "Ingress"


def serve_run(run_dir: Path, host: str | None, port: int | None) -> None:
    """Serve a run's newest policy; `host` and `port` default to the recipe's.

    With RAY_ADDRESS set, on that cluster: returns when the service is up, and it stays. Otherwise on a Ray of its own,
    until Ctrl-C or SIGTERM; then it finishes the requests in progress. Raises UserError if there is nothing to serve,
    the address cannot be used or there is no registry; RunFailedError if it does not start.
    """
    from deploy.runs.checkpoints import newest_servable

    run_dir = run_dir.resolve()
    source = Source(directory=str(run_dir), is_run=True, registry_url=None)
    address = _usable_address(source, host, port)
    with wait_display(f"checking the newest checkpoint of {run_dir.name}", at_once=True) as waiting:
        newest_servable(run_dir, waiting.change)
    with _ray() as ray:
        _serve(replace(source, registry_url=registry_of_cluster()), address, ray)


def serve_checkpoint(
    directory: Path, host: str | None, port: int | None, dtype: Literal["float32", "bfloat16"] = "float32"
) -> None:
    """Serve a checkpoint without a run, with weights in `dtype`. See `serve_run`."""
    from deploy.service.api.text_codec import TextCodec
    from learner.model.adapter import check_peft_copies, read_chain
    from learner.model.storage.weights import StoredWeights

    directory = directory.resolve()
    source = Source(directory=str(directory), is_run=False, registry_url=None, dtype=dtype)
    with (
        wait_display(f"looking at the checkpoint {directory.name}", at_once=True),
        user_errors(ValueError, prefix=f"cannot serve {directory}: "),
    ):
        TextCodec(directory)
        chain = read_chain(directory)
        weight_files(chain.weights)
        if chain.adapter is not None:
            check_peft_copies(directory, StoredWeights(chain.weights))
        generation_defaults(directory)
    # After the checks: this writes a key into the directory, which might not be a checkpoint.
    address = _usable_address(source, host, port)
    with _ray() as ray:
        _serve(source, address, ray)


def _usable_address(source: Source, host: str | None, port: int | None) -> Address:
    """Return the address to listen on. Raises UserError for unusable keys or ports, before Ray starts.

    On an existing cluster the port may be this service's own: `deploy_source` checks it.
    """
    # First, because it raises UserError if the directory is not a run: keys would be written into it.
    settings = source.settings
    address = Address(host=host or settings.host, port=port or settings.port)
    _check_keys(address.host)
    read_keys(source.path)
    if "RAY_ADDRESS" not in os.environ:
        _check_port(address)
    return address


@contextmanager
def _ray() -> Iterator[RaySession]:
    with ExitStack() as ray:
        with wait_display("connecting to Ray" if "RAY_ADDRESS" in os.environ else "starting Ray", at_once=True):
            session = ray.enter_context(ray_session(dashboard=True))
        yield session


def banner(run_dir: Path, url: str) -> str:
    """Return the address of the service, where its key is, and an example request."""
    where, key = _whose_key(run_dir)
    path, body = example_request(run_dir)
    return (
        f"Serving {run_dir.name} at {url}; the {where}.\n"
        f'  curl {url}{path} -H "Authorization: Bearer {key}" \\\n'
        f"    -H 'Content-Type: application/json' -d {body}"
    )


def banner_of_key(url: str, key: str) -> str:
    """Return what is shown on a terminal only, never in a log. A browser does not send the part after the #."""
    return f"The key is {key}\nThe page, with the key: {url}/#key={key}"


def _whose_key(run_dir: Path) -> tuple[str, str]:
    """Return where the key is, and a shell expression for it."""
    if os.environ.get(KEYS_FILE_VARIABLE):
        return f"keys are in the file {KEYS_FILE_VARIABLE}", "$KEY"
    if TOKEN_VARIABLE in os.environ:
        return f"token is in {TOKEN_VARIABLE}", f"${TOKEN_VARIABLE}"
    path = run_dir.resolve() / TOKEN_FILE
    return f"token is in {path}", f"$(cat {shlex.quote(str(path))})"


def _serve(source: Source, address: Address, session: RaySession) -> None:
    import ray
    from rich.console import Console

    is_ours, num_replicas = session.is_ours, source.settings.num_replicas
    # On a cluster the GPUs are a run's; a Ray of our own has no other user.
    num_gpus = 1 if is_ours and ray.available_resources().get("GPU", 0) >= num_replicas else 0
    # One core is left to the proxy, the ingress and the clients: threads that wait for a core block others.
    num_threads = max(1, (num_cpus() - 1) // num_replicas) if is_ours else 1
    with suppress(KeyboardInterrupt), terminated_by_sigterm():
        with wait_display("starting the service", at_once=True) as waiting:
            url = deploy_source(
                source, address, num_replicas, num_gpus=num_gpus, num_threads=num_threads, say=waiting.change
            )
        console = Console(highlight=False)
        console.print(banner(source.path, url), markup=False, soft_wrap=True)
        if sys.stdout.isatty() and (key := own_key(source.path)):
            console.print(banner_of_key(url, key), markup=False, soft_wrap=True)
        if session.dashboard_url:
            console.print(f"Ray's dashboard is at http://{session.dashboard_url}.", soft_wrap=True)
        if is_ours:
            console.print("Ctrl-C stops it.")
            try:
                # Without a limit: this is the program's work.
                wait_for_interrupt()
            finally:
                _drain(source)


def deploy_source(
    source: Source,
    address: Address,
    num_replicas: int,
    *,
    num_gpus: float = 0,
    num_threads: int = 1,
    say: Callable[[str], object] = lambda _: None,
) -> str:
    """Deploy the service on the connected cluster and wait until it answers; it outlives this process. Returns its URL.

    If the source is served already, its replicas are replaced one after another without a gap. The arguments are those
    of `bound_application`; `say` receives progress.

    Raises:
        UserError: the port is taken, the cluster serves something else, the service listens elsewhere, or others can
            reach the address without keys of the user's own.
        RunFailedError: the replicas did not start.
    """
    from ray import serve

    name = f"d1-{source.name}"
    application = bound_application(source, address, num_replicas, num_gpus=num_gpus, num_threads=num_threads)
    say("starting Ray Serve")
    # Serve's progress messages would mix with the caller's output.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    before = serve.status()
    if others := sorted(set(before.applications) - {name}):
        raise UserError(f"this cluster already serves {others[0]}; `serve shutdown` ends that, or use another cluster")
    if before.applications:
        _check_address(name, address)
    else:
        if before.proxies:
            # Proxies without an application: they cannot change their address.
            serve.shutdown()
        _check_port(address)
    _start_serve(address)
    # `serve.run` would wait without a limit.
    target = serve.RunTarget(
        application, name=name, route_prefix="/", external_scaler_enabled=source.settings.max_replicas is None
    )
    serve.run_many([target], wait_for_applications_running=False)
    awaited = {_ENGINE: f"the engines to load {source.name}", _INGRESS: "the HTTP ingress"}
    _wait_until_running(name, awaited, _ready_within_s(source), say)
    return address.url


def _start_serve(address: Address) -> None:
    """Start Serve with a proxy at `address`, or connect to the running one."""
    from ray import serve
    from ray.exceptions import RayError

    start = partial(
        serve.start,
        proxy_location="HeadOnly",
        http_options={"host": address.host, "port": address.port, "keep_alive_timeout_s": _KEEP_ALIVE_S},
        controller_options={"runtime_env": {"env_vars": _CONTROLLER_ENV}},
    )
    try:
        start()
    except (RayError, TimeoutError):
        # The proxy was slow. The controller replaces it, and a second start does not wait: `_wait_until_running` does.
        start()


def scale_engines(source: Source, num_replicas: int, dashboard_url: str) -> None:
    """Set the number of engines of a running service, through Serve's REST API. Surplus ones finish their requests.

    Redeploying with another number would restart all engines. Raises RunFailedError if Ray refuses or does not answer.
    """
    request = urllib.request.Request(
        f"http://{dashboard_url}/api/v1/applications/d1-{source.name}/deployments/{_ENGINE}/scale",
        json.dumps({"target_num_replicas": num_replicas}).encode(),
        {"Content-Type": "application/json"},
    )
    if token := ray_token():
        request.add_header("Authorization", f"Bearer {token}")
    try:
        urllib.request.urlopen(request, timeout=_SCALE_TIMEOUT_S).close()  # noqa: S310 - an http URL
    except urllib.error.HTTPError as error:
        with error:
            raise RunFailedError(f"Ray Serve refuses: {error.read().decode(errors='replace').strip()}") from error
    except OSError as error:
        raise RunFailedError(f"Ray's dashboard at {dashboard_url} does not answer: {reason(error)}") from error


def bound_application(
    source: Source,
    address: Address,
    num_replicas: int,
    *,
    num_gpus: float,
    num_threads: int = 1,
    num_ingresses: int = 1,
) -> Any:
    """Return the engines and their ingress as a Serve application that is not deployed yet.

    Args:
        source: run or checkpoint; a run must have a checkpoint.
        address: address of Serve's proxies.
        num_replicas: number of engines; with `service.max_replicas` their minimum.
        num_gpus: GPUs of each engine; 0: it computes on the CPU.
        num_threads: CPU threads of each engine; 1 if it shares the machine with a run.
        num_ingresses: replicas of the HTTP application.

    Raises UserError if the keys cannot be read, or the address needs keys of the user's own.
    """
    from deploy.service.on_ray.engine_replica import EngineReplica
    from deploy.service.on_ray.ingress import Ingress

    engine_class: Any = EngineReplica
    ingress_class: Any = Ingress
    _check_keys(address.host)
    keys = read_keys(source.path)
    scale: dict[str, Any] = {"num_replicas": num_replicas}
    if (most := source.settings.max_replicas) is not None:
        scale = {"autoscaling_config": {"min_replicas": num_replicas, "max_replicas": most}}
    engines = engine_class.options(ray_actor_options={"num_cpus": 0.01, "num_gpus": num_gpus}, **scale)
    ingresses = ingress_class.options(num_replicas=num_ingresses)
    return ingresses.bind(engines.bind(source, num_threads), source, keys, address, is_alone=num_ingresses == 1)


def _check_keys(host: str) -> None:
    """Raise UserError if other machines can reach the address and the user has not set the keys."""
    if not is_loopback(host) and not are_explicit():
        raise UserError(
            f"{host} can be reached from other machines; choose the keys yourself, in {TOKEN_VARIABLE} or in a file "
            f"named by {KEYS_FILE_VARIABLE}, or listen on 127.0.0.1"
        )


def _check_address(name: str, address: Address) -> None:
    """Raise UserError if the running application listens elsewhere: Serve's proxies cannot change their address."""
    from ray import serve

    listens_on = address
    # Deploying replaces an ingress that does not answer.
    with suppress(Exception):
        handle = serve.get_deployment_handle(_INGRESS, app_name=name)
        listens_on = handle.address.remote().result(timeout_s=_ADDRESS_TIMEOUT_S)
    if listens_on != address:
        raise UserError(
            f"cannot listen on {address.host}:{address.port}: the service already listens on {listens_on.host}:"
            f"{listens_on.port}, and Ray Serve cannot change that; run `serve shutdown` first"
        )


def _drain(source: Source) -> None:
    """Refuse new requests with 503, and wait until those in progress end."""
    from ray import serve

    handle = serve.get_deployment_handle(_INGRESS, app_name=f"d1-{source.name}")
    deadline = time.monotonic() + _DRAIN_TIMEOUT_S
    # If the service does not answer, there is nothing to wait for.
    with suppress(Exception):
        while sum(handle.broadcast("drain").results(timeout_s=_CALL_TIMEOUT_S)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        time.sleep(_FLUSH_S)


def _check_port(address: Address) -> None:
    """Raise UserError if something else listens there."""
    if why := why_not_bindable(address.host, address.port):
        raise UserError(f"cannot listen on {address.host}:{address.port}: {why}; choose another port")


def _ready_within_s(source: Source) -> float:
    """Return the seconds that the service may take to start: its engines read the weights."""
    directory = source.path / CHECKPOINTS / "initial" if source.is_run else source.path
    return transfer_timeout_s(_READY_TIMEOUT_S, max_float32_bytes(checkpoint_chain(directory)[-1]))


def _wait_until_running(name: str, awaited: Mapping[str, str], within_s: float, say: Callable[[str], object]) -> None:
    """Wait until an application runs; `awaited` describes its deployments in the progress messages.

    Raises RunFailedError if it fails to start, or does not run after `within_s` seconds.
    """
    from ray import serve

    deadline, said = time.monotonic() + within_s, ""
    while True:
        status = serve.status()
        application = status.applications[name]
        deployments = application.deployments
        pending = [
            what for one, what in awaited.items() if one not in deployments or deployments[one].status != "HEALTHY"
        ]
        if "HEALTHY" not in status.proxies.values():
            pending.append("Ray Serve's proxy")
        if pending and (now := f"waiting for {' and '.join(pending)}") != said:
            said = now
            say(said)
        if application.status == "RUNNING" and not pending:
            return
        if application.status == "DEPLOY_FAILED":
            # The last line of the failed replica's traceback.
            lines = application.message.strip().splitlines() or ["Ray Serve does not say why"]
            raise RunFailedError(f"the service did not come up: {lines[-1].strip()}")
        if time.monotonic() > deadline:
            raise RunFailedError(
                f"the service was not up after {within_s:.0f} s ({application.status}); "
                "does the cluster have room for another process?"
            )
        time.sleep(_POLL_S)
