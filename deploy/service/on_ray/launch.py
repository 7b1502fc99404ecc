"""Bringing the service up, on the cluster of a training job or on one of its own."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from actors.run_log import CHECKPOINTS
from deploy.errors import RunFailedError, UserError
from deploy.interrupts import terminated_by_sigterm, wait_for_interrupt
from deploy.machine import num_cpus, why_not_bindable
from deploy.ray_session import RaySession, ray_session, registry_of_cluster
from deploy.service.example import example_request
from deploy.service.gateway.address import Address
from deploy.service.gateway.api_keys import (
    KEYS_FILE_VARIABLE,
    TOKEN_FILE,
    TOKEN_VARIABLE,
    are_explicit,
    own_key,
    read_keys,
)
from deploy.service.gateway.callers import is_loopback
from deploy.service.source import Source
from deploy.wait_display import wait_display
from learner.model.checkpoint_files import checkpoint_chain, generation_defaults, max_float32_bytes, weight_files
from learner.parallel.timeouts import transfer_timeout_s

_READY_TIMEOUT_S = 180.0
_DRAIN_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 5.0
_SCALE_TIMEOUT_S = 30.0
_POLL_S = 0.2
_ENGINE, _INGRESS = "EngineReplica", "Ingress"


def serve_run(run_dir: Path, host: str | None, port: int | None) -> None:
    """Serve a run's newest policy; `host` and `port` default to the recipe's.

    With RAY_ADDRESS set, on that cluster: returns when the service is up, and it stays. Otherwise on a Ray of its own,
    until Ctrl-C or SIGTERM; then it finishes what is under way. Raises UserError when there is nothing to serve, the
    address cannot be used or there can be no registry; RunFailedError when it does not come up.
    """
    from deploy.runs.checkpoints import newest_servable, read_recipe

    run_dir = run_dir.resolve()
    service = read_recipe(run_dir).service
    address = Address(host=host or service.host, port=port or service.port)
    source = Source(directory=str(run_dir), is_run=True, registry_url=None)
    _check_listener(source, address)
    with wait_display(f"checking the newest checkpoint of {run_dir.name}", at_once=True) as waiting:
        newest_servable(run_dir, waiting.change)
    with _ray() as ray:
        source = replace(source, registry_url=registry_of_cluster())
        _serve(source, address, service.num_replicas, is_ours=ray.is_ours)


def serve_checkpoint(
    directory: Path, host: str | None, port: int | None, dtype: Literal["float32", "bfloat16"] = "float32"
) -> None:
    """Serve a checkpoint that has no run, its weights held in `dtype`; without `host` or `port` at a recipe's defaults.
    Otherwise as `serve_run`."""
    from deploy.recipe.recipe import ServiceSection
    from deploy.service.api.text_codec import TextCodec
    from learner.model.adapter import check_peft_copies, read_chain
    from learner.model.storage.weights import StoredWeights

    directory, service = directory.resolve(), ServiceSection()
    address = Address(host=host or service.host, port=port or service.port)
    source = Source(directory=str(directory), is_run=False, registry_url=None, dtype=dtype)
    with wait_display(f"looking at the checkpoint {directory.name}", at_once=True):
        try:
            TextCodec(directory)
            chain = read_chain(directory)
            weight_files(chain.weights)
            if chain.adapter is not None:
                check_peft_copies(directory, StoredWeights(chain.weights))
            generation_defaults(directory)
        except ValueError as error:
            raise UserError(f"cannot serve {directory}: {error}") from error
    # Only now: this writes a key into the directory, which might have been anybody's.
    _check_listener(source, address)
    with _ray() as ray:
        _serve(source, address, 1, is_ours=ray.is_ours)


def _check_listener(source: Source, address: Address) -> None:
    """Raise UserError for unusable keys or a taken port, before Ray starts, which takes longest.

    On a running cluster the port may belong to our own service, which the new one replaces; that is checked later.
    """
    _check_keys(address.host)
    read_keys(source.path)
    if "RAY_ADDRESS" not in os.environ:
        _check_port(address)


@contextmanager
def _ray() -> Iterator[RaySession]:
    with ExitStack() as ray:
        with wait_display("connecting to Ray" if "RAY_ADDRESS" in os.environ else "starting Ray", at_once=True):
            session = ray.enter_context(ray_session(dashboard=False))
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
    """What a terminal is shown besides, and no log. A browser sends nobody what follows the #."""
    return f"The key is {key}\nThe page, with the key: {url}/#key={key}"


def _whose_key(run_dir: Path) -> tuple[str, str]:
    """Return where the key is, and a shell expression for it."""
    if os.environ.get(KEYS_FILE_VARIABLE):
        return f"keys are in the file {KEYS_FILE_VARIABLE}", "$KEY"
    if TOKEN_VARIABLE in os.environ:
        return f"token is in {TOKEN_VARIABLE}", f"${TOKEN_VARIABLE}"
    path = run_dir.resolve() / TOKEN_FILE
    return f"token is in {path}", f"$(cat {shlex.quote(str(path))})"


def _serve(source: Source, address: Address, num_replicas: int, *, is_ours: bool) -> None:
    import ray
    from rich.console import Console

    # On a cluster the GPUs are a run's; a Ray of our own has nobody else to ask for them.
    num_gpus = 1 if is_ours and ray.available_resources().get("GPU", 0) >= num_replicas else 0
    with suppress(KeyboardInterrupt), terminated_by_sigterm():
        with wait_display("starting the service", at_once=True) as waiting:
            url = deploy_source(
                source,
                address.host,
                address.port,
                num_replicas,
                num_gpus=num_gpus,
                # A core is left to who asks, a browser say: a thread that waits for a core makes all others wait.
                num_threads=max(1, (num_cpus() - 1) // num_replicas) if is_ours else 1,
                say=waiting.change,
            )
        console = Console(highlight=False)
        console.print(banner(source.path, url), markup=False, soft_wrap=True)
        if sys.stdout.isatty() and (key := own_key(source.path)):
            console.print(banner_of_key(url, key), markup=False, soft_wrap=True)
        if is_ours:
            console.print("Ctrl-C stops it.")
            try:
                # Without a limit: this is the program's work.
                wait_for_interrupt()
            finally:
                _drain(source)


def deploy_source(
    source: Source,
    host: str,
    port: int,
    num_replicas: int,
    *,
    num_gpus: float = 0,
    num_threads: int = 1,
    say: Callable[[str], object] = lambda _: None,
) -> str:
    """Put the service on the connected cluster and wait until it answers; it outlives this process. Returns its URL.

    Deployed again for the same source, the replicas are replaced one after another without a gap.

    Args:
        source: what is served; a run must have a checkpoint.
        host: where each ingress listens.
        port: likewise.
        num_replicas: the engines.
        num_gpus: of each engine; without, it computes on the CPU.
        num_threads: of the CPU, for each engine; one for each process that shares the machine with a run.
        say: is told what is waited for, each time that it is something else.

    Raises:
        UserError: a port that is taken, a cluster that already serves something else, or an address that others can
            reach without keys of the user's own.
        RunFailedError: the replicas did not come up.
    """
    from ray import serve

    name, address = f"d1-{source.name}", Address(host=host, port=port)
    application = bound_application(source, address, num_replicas, num_gpus=num_gpus, num_threads=num_threads)
    say("starting Ray Serve")
    _start_serve()
    running = set(serve.status().applications)
    if others := sorted(running - {name}):
        raise UserError(f"this cluster already serves {others[0]}; `serve shutdown` ends that, or use another cluster")
    # What runs already listens where it listens: its successor takes over from it.
    _check_port(address, shares_port=name in running)
    # Nothing here waits without limit, as serve.run does.
    target = serve.RunTarget(application, name=name, route_prefix=None, external_scaler_enabled=True)
    serve.run_many([target], wait_for_applications_running=False)
    awaited = {_ENGINE: f"the engines to load {source.name}", _INGRESS: f"port {port}"}
    _wait_until_running(name, awaited, _ready_within_s(source), say)
    return address.url


def scale_engines(source: Source, num_replicas: int) -> None:
    """Have so many engines in the service of a source, which is up. Those that are there answer on; who has to go ends
    what it is at."""
    import ray
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    # What Serve's REST interface calls, which listens on the head node alone.
    client: Any = _get_global_client()
    engines = DeploymentID(name=_ENGINE, app_name=f"d1-{source.name}")
    ray.get(client._controller.update_deployment_replicas.remote(engines, num_replicas), timeout=_SCALE_TIMEOUT_S)


def bound_application(
    source: Source,
    address: Address,
    num_replicas: int,
    *,
    num_gpus: float,
    num_threads: int = 1,
    num_ingresses: int | None = None,
) -> Any:
    """The engines and the ingress before them, unstarted: a bound class carries its options to the cluster.

    Args:
        source: what is served.
        address: where each ingress listens.
        num_replicas: the engines.
        num_gpus: of each engine.
        num_threads: as in `deploy_source`.
        num_ingresses: None for one, on the head node.

    Raises UserError where the keys cannot be read, or nobody has chosen those that an address needs.
    """
    from deploy.service.gateway.http_server import ON_HEAD
    from deploy.service.on_ray.engine_replica import EngineReplica
    from deploy.service.on_ray.ingress import Ingress

    engine_class: Any = EngineReplica
    ingress_class: Any = Ingress
    resources = {"num_cpus": 0.01, "num_gpus": num_gpus}
    _check_keys(address.host)
    keys = read_keys(source.path)
    engines = engine_class.options(num_replicas=num_replicas, ray_actor_options=resources).bind(source, num_threads)
    placed = {"ray_actor_options": ON_HEAD} if num_ingresses is None else {"num_replicas": num_ingresses}
    is_alone = num_ingresses in (None, 1)
    return ingress_class.options(**placed).bind(engines, source, keys, address, is_alone=is_alone)


def _check_keys(host: str) -> None:
    """Raise UserError if other machines can reach the address, but the user has set no keys."""
    if not is_loopback(host) and not are_explicit():
        raise UserError(
            f"{host} can be reached from other machines; choose the keys yourself, in {TOKEN_VARIABLE} or in a file "
            f"named by {KEYS_FILE_VARIABLE}, or listen on 127.0.0.1"
        )


def _drain(source: Source) -> None:
    """Refuse what is new, in our error format, and let what is under way come to its end."""
    from ray import serve

    handle = serve.get_deployment_handle(_INGRESS, app_name=f"d1-{source.name}")
    deadline = time.monotonic() + _DRAIN_TIMEOUT_S
    # Whatever does not answer any more is not waited for.
    with suppress(Exception):
        while sum(handle.broadcast("drain").results(timeout_s=_CALL_TIMEOUT_S)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # What has its answer may not have all of it yet.
        handle.broadcast("end").results(timeout_s=_CALL_TIMEOUT_S)


def _start_serve() -> None:
    """Start Serve, or use what runs. It has no proxies: the ingress listens itself."""
    from ray import serve

    # Its driver-side progress notes would run through the caller's output.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")


def _check_port(address: Address, *, shares_port: bool = False) -> None:
    """Raise UserError where something else listens there; with `shares_port`, something that does not share it."""
    if why := why_not_bindable(address.host, address.port, shares_port=shares_port):
        raise UserError(f"cannot listen on {address.host}:{address.port}: {why}; choose another port")


def _ready_within_s(source: Source) -> float:
    """Seconds that the service of a source may take to come up: its engines read the weights."""
    directory = source.path / CHECKPOINTS / "initial" if source.is_run else source.path
    return transfer_timeout_s(_READY_TIMEOUT_S, max_float32_bytes(checkpoint_chain(directory)[-1]))


def _wait_until_running(name: str, awaited: Mapping[str, str], within_s: float, say: Callable[[str], object]) -> None:
    """Wait for an application.

    Args:
        name: its name.
        awaited: what is waited for while a deployment, by its name, is not up.
        within_s: how long.
        say: is told.

    Raises RunFailedError when it is not up by then, or cannot come up.
    """
    from ray import serve

    deadline, said = time.monotonic() + within_s, ""
    while True:
        application = serve.status().applications[name]
        deployments = application.deployments
        pending = [
            what for one, what in awaited.items() if one not in deployments or deployments[one].status != "HEALTHY"
        ]
        if pending and (now := f"waiting for {' and '.join(pending)}") != said:
            said = now
            say(said)
        if application.status == "RUNNING":
            return
        if application.status == "DEPLOY_FAILED":
            # Serve tells the traceback of whom it could not start; what it ends with is why.
            lines = application.message.strip().splitlines() or ["Ray Serve does not say why"]
            raise RunFailedError(f"the service did not come up: {lines[-1].strip()}")
        if time.monotonic() > deadline:
            raise RunFailedError(
                f"the service was not up after {within_s:.0f} s ({application.status}); "
                "does the cluster have room for another process?"
            )
        time.sleep(_POLL_S)
