"""Ray, connected to or started, for as long as a block lasts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySession:
    """A connection to Ray."""

    is_ours: bool
    """Whether the Ray was started here and ends with the block."""
    dashboard_url: str
    """Where its dashboard is, empty without one."""


@contextmanager
def ray_session(*, dashboard: bool) -> Iterator[RaySession]:
    """Connect to the cluster that RAY_ADDRESS names, or start a Ray on this machine.

    Args:
        dashboard: whether a Ray that is started here has a dashboard."""
    import ray

    from actors.cluster import WORKER_ENV
    from actors.weights import NAMESPACE

    os.environ.update(WORKER_ENV)
    _keep_notes_in_logs()
    is_ours = "RAY_ADDRESS" not in os.environ
    previous_umask = os.umask(0o077)  # Ray writes its token file with the default permissions.
    try:
        context = ray.init(
            address="local" if is_ours else None,
            namespace=NAMESPACE,
            include_dashboard=dashboard if is_ours else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": WORKER_ENV},
        )
    finally:
        os.umask(previous_umask)
    try:
        yield RaySession(is_ours=is_ours, dashboard_url=context.dashboard_url or "")
    finally:
        ray.shutdown()


def _keep_notes_in_logs() -> None:
    """What Ray notes of a worker that died is in its logs: `log_to_driver` does not keep it off our standard output."""
    from ray._private import worker

    worker._worker_logs_enabled = False
