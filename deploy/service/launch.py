"""Bringing the service up, on the cluster of a training job or on one of its own."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.errors import UserError
from deploy.ray_session import ray_session

TOKEN_VARIABLE = "D1_API_TOKEN"  # noqa: S105 - a name
TOKEN_FILE = "service.token"  # noqa: S105 - a name
_LEAST_TOKEN_LENGTH = 16
_READY_TIMEOUT_S = 180.0
_POLL_S = 0.2


def serve_run(run_dir: Path, host: str, port: int) -> None:
    """Serve a run's newest policy.

    With RAY_ADDRESS set, on that cluster: returns when the service is up, and it stays. Otherwise on a Ray of its own,
    until Ctrl-C. Raises UserError when there is nothing to serve or the address cannot be used.
    """
    from rich.console import Console

    from actors.registry_server import registry_url
    from deploy.service.run_files import newest_to_answer, read_recipe

    run_dir = run_dir.resolve()
    num_replicas = read_recipe(run_dir).service.num_replicas
    newest_to_answer(run_dir)
    with suppress(KeyboardInterrupt), ray_session(dashboard=False) as ray:
        url = deploy_service(run_dir, registry_url(), host, port, num_replicas)
        console = Console()
        console.print(banner(run_dir, url), markup=False, soft_wrap=True)
        if ray.is_ours:
            console.print("Ctrl-C stops it.")
            # Without a limit: this is the program's work.
            threading.Event().wait()


def deploy_service(run_dir: Path, registry_url: str, host: str, port: int, num_replicas: int) -> str:
    """Put the service on the connected cluster and wait until it answers; it outlives this process. Returns its URL.

    The run must have a checkpoint. Deployed again for the same run, the replicas are replaced one after another
    without a gap.

    Raises:
        UserError: a port that is taken, or a cluster that already serves something else.
        RuntimeError: the replicas did not come up.
    """
    from ray import serve

    from deploy.service.app import digest_of
    from deploy.service.replica import PolicyReplica
    from deploy.service.run_files import read_recipe

    run_dir = run_dir.resolve()
    name = f"d1-{read_recipe(run_dir).name}"
    digest = digest_of(service_token(run_dir))
    _start_serve(host, port)
    others = sorted(set(serve.status().applications) - {name})
    if others:
        raise UserError(f"this cluster already serves {others[0]}; `serve shutdown` ends that, or use another cluster")
    # A bound class carries its options to the cluster; nothing here waits without limit, as serve.run does.
    replica: Any = PolicyReplica
    application = replica.options(num_replicas=num_replicas).bind(str(run_dir), registry_url, digest)
    serve.run_many([serve.RunTarget(application, name=name)], wait_for_applications_running=False)
    _wait_until_running(name)
    return f"http://{host}:{port}"


def service_token(run_dir: Path) -> str:
    """The token that clients must send: D1_API_TOKEN, or else RUN/service.token, made if there is none.

    Raises UserError when it is too short to protect anything.
    """
    path = run_dir / TOKEN_FILE
    if TOKEN_VARIABLE in os.environ:
        source, token = TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE].strip()
    else:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        source, token = str(path), path.read_text().strip()
    if len(token) < _LEAST_TOKEN_LENGTH:
        raise UserError(f"{source} has {len(token)} characters; a token needs {_LEAST_TOKEN_LENGTH} or more")
    return token


def banner(run_dir: Path, url: str) -> str:
    """What a user needs in order to ask the service something."""
    from_environment = TOKEN_VARIABLE in os.environ
    token = f"${TOKEN_VARIABLE}" if from_environment else f"$(cat {run_dir.resolve() / TOKEN_FILE})"
    where = f"in {TOKEN_VARIABLE}" if from_environment else f"in {run_dir.resolve() / TOKEN_FILE}"
    return (
        f"Serving {run_dir.name} at {url}; the token is {where}.\n"
        f'  curl {url}/v1/completions -H "Authorization: Bearer {token}" \\\n'
        f"    -H 'Content-Type: application/json' -d '{{\"prompt\": \"What is 2 + 3?\"}}'"
    )


def _start_serve(host: str, port: int) -> None:
    """Start Serve, or use what runs if it listens where we want: Serve would silently keep its old address."""
    from ray import serve
    from ray.serve.context import _get_global_client

    # Its driver-side progress notes would run through the caller's output.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    elif (client.http_config.host, client.http_config.port) != (host, port):
        raise UserError(
            f"this cluster's service listens on {client.http_config.host}:{client.http_config.port}, "
            f"not on {host}:{port}; take that address, or end it with `serve shutdown`"
        )


def _wait_until_running(name: str) -> None:
    from ray import serve

    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        application = serve.status().applications[name]
        if application.status == "RUNNING":
            return
        if application.status == "DEPLOY_FAILED":
            raise RuntimeError(f"the service did not come up: {application.message}")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the service was not up after {_READY_TIMEOUT_S:.0f} s ({application.status}); "
                "does the cluster have room for another process?"
            )
        time.sleep(_POLL_S)
