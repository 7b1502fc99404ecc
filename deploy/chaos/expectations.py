"""What may become of a run when something fails: the promises of docs/reliability.md, as data."""

from __future__ import annotations

from enum import StrEnum

from deploy.chaos.faults import Target


class FaultOutcome(StrEnum):
    """What became of a run after a fault."""

    WENT_ON = "went on"
    """The same `d1 train` went on."""
    RESUMED = "resumed"
    """`d1 train` ended, and `--resume` went on."""
    STUCK = "stuck"
    """Neither, within the session's patience: `d1 train` had to be killed."""


_GOES_ON = frozenset({FaultOutcome.WENT_ON})
_MAY_END = frozenset({FaultOutcome.WENT_ON, FaultOutcome.RESUMED})

ALLOWED: dict[Target, frozenset[FaultOutcome]] = {
    Target.SAMPLER: _GOES_ON,
    Target.GRADER: _GOES_ON,
    Target.LEARNER: _GOES_ON,
    Target.CONTROLLER: _MAY_END,
    Target.COORDINATOR: _GOES_ON,
    Target.STORE: _GOES_ON,
    Target.REGISTRY: _GOES_ON,
    Target.DRIVER: _MAY_END,
    Target.RAYLET: _MAY_END,
    Target.GCS: _MAY_END,
    Target.GCS_ON_REDIS: _GOES_ON,
    Target.DISK: _GOES_ON,
    Target.CLOCK: _GOES_ON,
    # A learner is killed too.
    Target.BYTES: _GOES_ON,
    Target.POOL: _GOES_ON,
}
"""What each target's loss may lead to. Tighter is better: whoever makes a role restartable takes its RESUMED away."""
