"""What can be done to a run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
    """What a fault is done to: the processes of a role, or a part of the machine."""

    SAMPLER = "sampler"
    GRADER = "grader"
    LEARNER = "learner"
    """One rank of the learner group."""
    CONTROLLER = "controller"
    """Ray Train's, which watches over the learner group."""
    COORDINATOR = "coordinator"
    STORE = "store"
    """The weight store."""
    REGISTRY = "registry"
    DRIVER = "driver"
    """`d1 train` itself."""
    RAYLET = "raylet"
    GCS = "gcs"
    """Ray's, whose state is in its memory."""
    GCS_ON_REDIS = "gcs-on-redis"
    """Ray's, whose state is in a Redis; whoever supervises it starts it again."""
    DISK = "disk"
    """The file system of the run directory."""
    CLOCK = "clock"
    BYTES = "bytes"
    """Of the newest checkpoint."""
    POOL = "pool"
    """The number of samplers."""


class Harm(StrEnum):
    """What is done."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    TERM = "SIGTERM"
    FILL = "full"
    JUMP = "jump"
    FLIP = "flip"
    """One byte; then a learner is killed, so that the checkpoint must be read."""
    SCALE = "scaled"
    """As `d1 scale` does it, to one sampler or one more, and back."""


class Moment(StrEnum):
    """When it is done."""

    ANY = "any"
    """Some seconds after the run has recovered from the fault before."""
    PUBLISHED = "publish..checkpoint"
    """Between the publication of a round's version and the checkpoint of that round."""
    CHECKPOINT = "mid-checkpoint"
    """While a checkpoint is being written."""
    COLLECTIVE = "mid-collective"
    """While the other ranks wait for this one: it stands still for a second before."""
    WRITTEN = "after a checkpoint"
    """When a round's checkpoint is complete: it will be the newest for a while."""


class Setting(StrEnum):
    """What a run has to run on for a fault to be possible."""

    OWN_RAY = "its own Ray"
    CLUSTER = "a cluster whose GCS keeps its state in Redis"
    MOVABLE_CLOCK = "a clock that can be moved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One of the things that will be done to a run."""

    number: int
    """Its place in the schedule, from 1."""
    target: Target
    """What it is done to."""
    harm: Harm
    """What is done."""
    moment: Moment
    """When."""
    delay_s: float
    """Seconds to wait after the run has recovered, before the moment is looked for."""
    choice: float
    """In [0, 1): which of several processes, or which byte."""
    seconds: float | None
    """How long it lasts, or how far the clock jumps; None: for ever, or it has no length."""

    @property
    def setting(self) -> Setting:
        """What the run has to run on."""
        own = {Target.GCS_ON_REDIS: Setting.CLUSTER, Target.CLOCK: Setting.MOVABLE_CLOCK}
        return own.get(self.target, Setting.OWN_RAY)

    def __str__(self) -> str:
        lasts = ""
        if self.harm in (Harm.STOP, Harm.FILL, Harm.SCALE):
            lasts = " for ever" if self.seconds is None else f" for {self.seconds:.1f} s"
        elif self.harm is Harm.JUMP:
            lasts = f" by {self.seconds:+.0f} s"
        at = "" if self.moment is Moment.ANY else f" {self.moment}"
        return f"{self.harm} {self.target}{lasts}{at}"
