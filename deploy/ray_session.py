"""Ray, connected to or started, for as long as a block lasts."""

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

from deploy.errors import RunFailedError, UserError, reason
from deploy.orphans import descendants, kill_descendants

MOST_STARTS = 3
"""How often a Ray of our own is tried to be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySession:
    """A connection to Ray."""

    is_ours: bool
    """Whether the Ray was started here and ends with the block."""
    dashboard_url: str
    """Where its dashboard is, empty without one."""
    logs_dir: Path
    """Where its processes on this machine log."""


@contextmanager
def ray_session(*, dashboard: bool) -> Iterator[RaySession]:
    """Connect to the cluster that RAY_ADDRESS names, or start a Ray on this machine.

    Args:
        dashboard: whether a Ray that is started here has a dashboard.

    Raises RunFailedError when it does not start or answer, UserError when its token cannot be kept.
    """
    import ray

    from actors import NAMESPACE
    from actors.cluster import WORKER_ENV

    os.environ.update(WORKER_ENV)
    _keep_notes_in_logs()
    is_ours = "RAY_ADDRESS" not in os.environ
    if is_ours:
        # Ray would run its workers at 15: beside any other work of the machine they would get next to nothing.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # It would start a worker for each CPU at once, none of which has WORKER_ENV: no actor of a run is in them.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
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
    context = connected(connect, num_tries=MOST_STARTS if is_ours else 1)
    try:
        node: Any = ray.get_runtime_context().worker.node
        logs_dir = Path(node.get_logs_dir_path())
        yield RaySession(is_ours=is_ours, dashboard_url=context.dashboard_url or "", logs_dir=logs_dir)
    finally:
        ray.shutdown()


def registry_of_cluster() -> str:
    """Where the registry of the connected cluster is, as of `registry_url`.

    Raises UserError where there can be none, RunFailedError where the embedded one does not start.
    """
    from actors.registry import server

    try:
        return server.registry_url()
    except (ValueError, ConnectionError) as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:
        raise RunFailedError(str(error)) from error


def _stay_on_loopback() -> None:
    """Let a Ray that is started here listen on loopback alone, its metrics too, which need no token.

    It takes the address of the node's network card for its own, and then listens on all, unless it is told that there
    is no cluster to be one of: then it is 127.0.0.1.
    """
    from ray._private import ray_constants

    alone = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    os.environ.setdefault(alone, "0")
    # It read that when it was imported.
    ray_constants.ENABLE_RAY_CLUSTER = os.environ[alone] not in ("0", "false")


def connected(connect: Callable[[], Any], num_tries: int) -> Any:
    """What `connect` returns. Ray gives its processes 30 s to start, which a busy machine may need: it tries again.

    Raises RunFailedError.
    """
    for attempt in range(1, num_tries + 1):
        before = descendants(os.getpid())
        try:
            return connect()
        except Exception as error:  # Ray raises a plain one where a process of its own does not start.
            _clean_up_after(before)
            if attempt == num_tries:
                raise RunFailedError(_why_no_ray(error, is_ours="RAY_ADDRESS" not in os.environ)) from error
        with letting_go():
            gc.collect()
    raise AssertionError("a try returns or raises")


def _clean_up_after(before: Collection[int]) -> None:
    """End what a start of Ray that failed has started, and reap it: Ray forgets its processes, some while they run."""
    import ray

    started = descendants(os.getpid()).difference(before)
    with letting_go():
        ray.shutdown()
    kill_descendants(spared=before)
    for pid in started:
        # Reaped by Ray, or another's child.
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


@contextmanager
def letting_go() -> Iterator[None]:
    """What Ray holds of its processes goes within the block, without a warning that they still run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def _make_token(path: Path) -> None:
    """Make Ray's token, unless there is one: Ray itself would write a file that everybody reads.

    The file alone has the mode, not the umask: every process that Ray starts would have that, and all that they write.
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
        # Another process may have been faster, and Ray may run with its token.
        with suppress(FileExistsError):
            os.link(whole, path)
    except OSError as error:
        raise UserError(f"Ray's token cannot be written to {path}: {reason(error)}; set RAY_AUTH_TOKEN") from error
    finally:
        with suppress(OSError):
            whole.unlink()


def _why_no_ray(error: Exception, *, is_ours: bool) -> str:
    first_line = str(error).partition("\n")[0].strip() or type(error).__name__
    if not is_ours:
        return f"could not connect to the Ray cluster at RAY_ADDRESS {os.environ['RAY_ADDRESS']}: {first_line}"
    directory = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")  # noqa: S108 - Ray's
    return f"Ray did not start on this machine: {first_line}; its logs are in {directory / 'session_latest' / 'logs'}"


def _keep_notes_in_logs() -> None:
    """What Ray notes of a worker that died is in its logs: `log_to_driver` does not keep it off our standard output."""
    from ray._private import worker

    worker._worker_logs_enabled = False
