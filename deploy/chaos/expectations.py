"""What may become of a run when something fails: the promises of docs/reliability.md, as data."""

from __future__ import annotations

from enum import StrEnum

from deploy.chaos.faults import Target


class Outcome(StrEnum):
    """What became of a run after a fault."""

    WENT_ON = "went on"
    """The same `d1 train` went on."""
    RESUMED = "resumed"
    """`d1 train` ended, and `--resume` went on."""
    STUCK = "stuck"
    """Neither, within the session's patience: `d1 train` had to be killed."""


_GOES_ON = frozenset({Outcome.WENT_ON})
_MAY_END = frozenset({Outcome.WENT_ON, Outcome.RESUMED})

ALLOWED: dict[Target, frozenset[Outcome]] = {
    Target.SAMPLER: _GOES_ON,
    Target.GRADER: _GOES_ON,
    # Ray Train starts the group again twice; a third fault in one `d1 train` ends it.
    Target.LEARNER: _MAY_END,
    Target.CONTROLLER: _MAY_END,
    Target.COORDINATOR: _MAY_END,
    Target.STORE: _MAY_END,
    Target.REGISTRY: _GOES_ON,
    Target.DRIVER: _MAY_END,
    Target.RAYLET: _MAY_END,
    Target.GCS: _MAY_END,
    Target.GCS_ON_REDIS: _GOES_ON,
    Target.DISK: _MAY_END,
    Target.CLOCK: _GOES_ON,
    # A learner is killed too.
    Target.BYTES: _MAY_END,
}
"""What each target's loss may lead to. Tighter is better: whoever makes a role restartable takes its RESUMED away."""
