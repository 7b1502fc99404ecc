"""Ray session for the duration of a block: connects to a cluster, or starts a local Ray."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy.errors import RunFailedError, UserError, first_line, reason, user_errors
from deploy.orphans import descendants, kill_descendants

MAX_STARTS = 3
"""Maximum number of attempts to start a local Ray."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySession:
    """A connection to Ray."""

    is_ours: bool
    """Whether Ray was started here and ends with the block."""
    dashboard_url: str
    """Host and port of its dashboard; empty without one."""
    logs_dir: Path
    """Directory of the logs of its processes on this machine."""


@contextmanager
def ray_session(*, dashboard: bool) -> Iterator[RaySession]:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray on this machine, with or without a dashboard.

    Raises RunFailedError if Ray does not start or answer, UserError if its token cannot be written.
    """
    import ray

    from actors import NAMESPACE
    from actors.cluster import WORKER_ENV

    os.environ.update(WORKER_ENV)
    _keep_notes_in_logs()
    is_ours = "RAY_ADDRESS" not in os.environ
    if is_ours:
        # Ray's default niceness of 15 starves its workers if the machine has any other load.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Ray would prestart a worker per CPU without WORKER_ENV, which no actor of a run can use.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Replicas of Ray Serve stream over gRPC: half the overhead of actor calls (docs/benchmarks.md).
        os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
        _stay_on_loopback()
        _make_token(Path.home() / ".ray" / "auth_token")
    connect = partial(
        ray.init,
        address="local" if is_ours else None,
        namespace=NAMESPACE,
        include_dashboard=dashboard if is_ours else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": WORKER_ENV},
    )
    context = connect_with_retries(connect, num_tries=MAX_STARTS if is_ours else 1)
    try:
        node: Any = ray.get_runtime_context().worker.node
        logs_dir = Path(node.get_logs_dir_path())
        yield RaySession(is_ours=is_ours, dashboard_url=context.dashboard_url or "", logs_dir=logs_dir)
    finally:
        ray.shutdown()


def registry_of_cluster() -> str:
    """Return the URL of the connected cluster's registry, as `registry_url` does.

    Raises UserError if it is misconfigured or unreachable, RunFailedError if the embedded one does not start.
    """
    from actors.registry import server

    try:
        with user_errors(ValueError, ConnectionError):
            return server.registry_url()
    except RuntimeError as error:
        raise RunFailedError(str(error)) from error


def _stay_on_loopback() -> None:
    """Make a Ray that is started here listen only on loopback, including its metrics, which need no token.

    By default Ray takes the address of the node's network card and listens on all interfaces. With clusters disabled it
    uses 127.0.0.1.
    """
    # Private: Ray reads the variable only at import, and offers no other switch.
    from ray._private import ray_constants

    alone = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    os.environ.setdefault(alone, "0")
    ray_constants.ENABLE_RAY_CLUSTER = os.environ[alone] not in ("0", "false")


def connect_with_retries(connect: Callable[[], Any], num_tries: int) -> Any:
    """Return the result of `connect`, with retries: Ray gives its processes 30 s to start, too few on a busy machine.

    Raises RunFailedError if all attempts fail.
    """
    for attempt in range(1, num_tries + 1):
        before = descendants(os.getpid())
        # Around the whole try: the error holds Ray's process handles, and the end of `except` deletes it.
        with ignoring_resource_warnings():
            try:
                return connect()
            except Exception as error:  # Ray raises a plain one if one of its processes does not start.
                _clean_up_after(before)
                if attempt == num_tries:
                    raise RunFailedError(_why_no_ray(error)) from error
            gc.collect()
    raise AssertionError("a try returns or raises")


def _clean_up_after(before: Collection[int]) -> None:
    """Kill and reap the processes of a failed start of Ray, which forgets them, some while they still run."""
    import ray

    started = descendants(os.getpid()).difference(before)
    ray.shutdown()
    kill_descendants(spared=before)
    for pid in started:
        # Already reaped by Ray, or not our child.
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


@contextmanager
def ignoring_resource_warnings() -> Iterator[None]:
    """Suppress the warnings about running processes when Ray's process handles are deleted within the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def _make_token(path: Path) -> None:
    """Create Ray's token unless there is one: Ray itself would write a world-readable file.

    The mode is set on the file, not by umask, which every process that Ray starts would inherit for all its files.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if path.exists() or any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(whole, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        # Another process may have been faster, and Ray may already use its token.
        with suppress(FileExistsError):
            os.link(whole, path)
    except OSError as error:
        raise UserError(f"Ray's token cannot be written to {path}: {reason(error)}; set RAY_AUTH_TOKEN") from error
    finally:
        with suppress(OSError):
            whole.unlink()


def ray_token() -> str:
    """Return the token of Ray's HTTP servers, from where Ray itself reads it; empty if there is none or it is off."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


def _why_no_ray(error: Exception) -> str:
    if address := os.environ.get("RAY_ADDRESS"):
        return f"could not connect to the Ray cluster at RAY_ADDRESS {address}: {first_line(error)}"
    directory = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")  # noqa: S108 - Ray's
    logs = directory / "session_latest" / "logs"
    return f"Ray did not start on this machine: {first_line(error)}; its logs are in {logs}"


def _keep_notes_in_logs() -> None:
    """Keep Ray's notes on dead workers out of our stdout, which `log_to_driver` does not do: they are in its logs."""
    # Private: the public `log_to_driver` does not cover these notes.
    from ray._private import worker

    worker._worker_logs_enabled = False
