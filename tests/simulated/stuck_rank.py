"""A learner rank of a run that gets stuck once, before an all-reduce: it loops for ever, or is stopped."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

from learner.parallel import progress
from learner.parallel.progress import PROGRESS, Progress

RANK, ACTIVITY, COLLECTIVE = 1, "round 2: training", "the all-reduce of the gradient norm"
_VARIABLE = "D1_TEST_STUCK"
# Python imports this module at startup if it is on the path.
_SITE = "from tests.simulated.stuck_rank import install\n\ninstall()\n"
_ROOT = Path(__file__).parents[2]
_MIN_BOUND_S = 20.0


def environment_of(directory: Path, how: str) -> dict[str, str]:
    """Return variables for a run whose rank gets stuck: `how` is `loops` or `is stopped`; empty for neither."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    return {_VARIABLE: f"{how}:{directory / 'was-stuck'}", "PYTHONPATH": f"{directory}:{_ROOT}"}


def install() -> None:
    """Make this process get stuck where its environment says so."""
    how, _, mark = os.environ[_VARIABLE].partition(":")
    in_collective = Progress.in_collective
    progress.MIN_BOUND_S = _MIN_BOUND_S

    def get_stuck(name: str) -> AbstractContextManager[None]:
        if how and name == COLLECTIVE and PROGRESS.place.activity == ACTIVITY and not Path(mark).exists():
            import torch.distributed as dist

            if dist.get_rank() == RANK:
                Path(mark).touch()
                if how == "is stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                while True:
                    time.sleep(0.01)
        return in_collective(PROGRESS, name)

    PROGRESS.in_collective = get_stuck  # type: ignore[method-assign]
