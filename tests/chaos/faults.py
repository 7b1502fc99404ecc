"""Faults that can be injected into a training run, and the schedule of a session's faults."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from benchmarks.processes.run_processes import Role


class Target(StrEnum):
    """What a fault hits: a role's processes, or a part of the machine."""

    SAMPLER = "sampler"
    GRADER = "grader"
    LEARNER = "learner"
    """One rank of the learner group."""
    CONTROLLER = "controller"
    """Ray Train's controller."""
    COORDINATOR = "coordinator"
    STORE = "store"
    """The weight store."""
    REGISTRY = "registry"
    DRIVER = "driver"
    """The process of `d1 train`."""
    RAYLET = "raylet"
    GCS = "gcs"
    """Ray's GCS with its state in memory."""
    GCS_ON_REDIS = "gcs-on-redis"
    """Ray's GCS with its state in Redis. The session restarts it."""
    DISK = "disk"
    """The file system of the run directory."""
    CLOCK = "clock"
    BYTES = "bytes"
    """The weights of the newest checkpoint."""
    POOL = "pool"
    """The number of samplers."""
    MACHINE = "machine"
    """The machine without the driver."""
    LINK = "link"
    """The network link of that machine."""


class FaultKind(StrEnum):
    """What is done to the target."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    TERM = "SIGTERM"
    FILL = "full"
    JUMP = "jump"
    FLIP = "flip"
    """One bit flips, then a learner is killed so that the checkpoint is read."""
    SCALE = "scaled"
    """`d1 scale` removes or adds a sampler, and reverts it."""
    LOSE = "lost"
    """A machine is cut off and all its processes are killed; another one replaces it."""
    CUT = "cut"
    """Nothing arrives or leaves, and no connection is closed."""


class Trigger(StrEnum):
    """When the fault is injected."""

    ANY = "any"
    """Any time after the run has recovered from the previous fault."""
    PUBLISHED = "publish..checkpoint"
    """Between the publication of a round's version and the checkpoint of that round."""
    CHECKPOINT = "mid-checkpoint"
    """While a checkpoint is written."""
    COLLECTIVE = "mid-collective"
    """While the other ranks wait for this one, which is stopped for a second first."""
    WRITTEN = "after a checkpoint"
    """Once a round's checkpoint is complete."""


class Platform(StrEnum):
    """What the run runs on."""

    OWN_RAY = "its own Ray"
    CLUSTER = "a cluster whose GCS keeps its state in Redis"
    MOVABLE_CLOCK = "a clock that can be moved"
    TWO_MACHINES = "two machines"


class FaultOutcome(StrEnum):
    """What a fault led to."""

    CONTINUED = "continued"
    """The same `d1 train` continued."""
    RESUMED = "resumed"
    """`d1 train` ended, and `--resume` continued."""
    STUCK = "stuck"
    """No progress until the timeout; the session killed `d1 train`."""


ROLES = {Target(role.value): role for role in Role} | {
    Target.GCS_ON_REDIS: Role.GCS,
    Target.BYTES: Role.LEARNER,
    Target.POOL: Role.SAMPLER,
}
"""Role whose processes a fault hits, for the targets that have one."""
MAY_END_RUN = {Target.CONTROLLER, Target.DRIVER, Target.RAYLET, Target.GCS}
"""Targets whose loss may end `d1 train`, to be resumed. After any other loss it must continue."""

ON_MACHINES = (
    *(Target.SAMPLER, Target.GRADER, Target.LEARNER, Target.CONTROLLER, Target.COORDINATOR, Target.STORE),
    *(Target.DRIVER, Target.DISK, Target.BYTES, Target.POOL, Target.MACHINE, Target.LINK),
)
"""Targets of a session on two machines."""

_SIGNALS = (FaultKind.KILL, FaultKind.STOP, FaultKind.TERM)
_OTHER_KINDS = {
    Target.DISK: FaultKind.FILL,
    Target.CLOCK: FaultKind.JUMP,
    Target.BYTES: FaultKind.FLIP,
    Target.POOL: FaultKind.SCALE,
    Target.MACHINE: FaultKind.LOSE,
    Target.LINK: FaultKind.CUT,
}
_PLATFORMS = {
    Target.GCS_ON_REDIS: Platform.CLUSTER,
    Target.CLOCK: Platform.MOVABLE_CLOCK,
    Target.MACHINE: Platform.TWO_MACHINES,
    Target.LINK: Platform.TWO_MACHINES,
}
_TRIGGERED = (
    (Trigger.PUBLISHED, (Target.LEARNER, Target.COORDINATOR, Target.STORE, Target.DRIVER)),
    (Trigger.CHECKPOINT, (Target.LEARNER, Target.DRIVER, Target.COORDINATOR)),
    (Trigger.COLLECTIVE, (Target.LEARNER,)),
)
# d1 replaces these when they hang, so they may be stopped for ever.
_REPLACED = {Target.SAMPLER, Target.GRADER, Target.LEARNER, Target.CONTROLLER, Target.COORDINATOR, Target.STORE}
_LASTING = (FaultKind.STOP, FaultKind.FILL, FaultKind.SCALE, FaultKind.LOSE, FaultKind.CUT)
_DELAY_S, _STOP_S, _FULL_S, _DOWN_S = (0.2, 4.0), (1.0, 10.0), (1.0, 6.0), (0.5, 8.0)
_SCALED_S = (0.5, 15.0)
# Ray counts a machine as lost after some of these cuts, and does not notice others.
_LOST_S, _CUT_S = (1.0, 30.0), (0.2, 20.0)
_JUMPS_S = (-7200.0, -60.0, 60.0, 7200.0)

_Case = tuple[Target, FaultKind, Trigger]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of a session."""

    number: int
    """Index in the schedule, from 1."""
    target: Target
    """What it hits."""
    kind: FaultKind
    """What is done."""
    trigger: Trigger
    """When."""
    delay_s: float
    """Seconds to wait after recovery before the trigger is watched for."""
    choice: float
    """Selects among several processes or bytes, in [0, 1)."""
    seconds: float | None
    """Duration, or the jump of the clock; None: for ever, or instantaneous."""
    on_machines: bool = False
    """Whether the run is on two machines where one would do."""

    @property
    def platform(self) -> Platform:
        """What the run must run on."""
        return _PLATFORMS.get(self.target, Platform.TWO_MACHINES if self.on_machines else Platform.OWN_RAY)

    def __str__(self) -> str:
        duration = ""
        if self.kind in _LASTING:
            duration = " for ever" if self.seconds is None else f" for {self.seconds:.1f} s"
        elif self.kind is FaultKind.JUMP:
            duration = f" by {self.seconds:+.0f} s"
        trigger = "" if self.trigger is Trigger.ANY else f" {self.trigger}"
        return f"{self.kind} {self.target}{duration}{trigger}"


def schedule(
    num_faults: int, seed: int, targets: Collection[Target] = tuple(Target), *, on_machines: bool = False
) -> list[Fault]:
    """Return the faults of a seed, sorted by platform. `on_machines`: on two machines where one would do.

    The first ones reach each target and each trigger once, the next ones send each signal to each role, and the rest
    is random.
    """
    draw = Random(seed)
    chosen: list[_Case] = []
    for cases in (_each_target(targets), _each_trigger(targets), _each_signal(targets)):
        new = [case for case in cases if case not in chosen]
        draw.shuffle(new)
        chosen += new
    every = sorted(chosen)
    while len(chosen) < num_faults:
        chosen.append(draw.choice(every))
    faults = [replace(_fault(case, draw), on_machines=on_machines) for case in chosen[:num_faults]]
    draw.shuffle(faults)
    faults.sort(key=lambda fault: list(Platform).index(fault.platform))
    return [replace(fault, number=number) for number, fault in enumerate(faults, start=1)]


def _each_target(targets: Collection[Target]) -> Iterator[_Case]:
    for target in targets:
        trigger = Trigger.WRITTEN if target is Target.BYTES else Trigger.ANY
        yield target, _OTHER_KINDS.get(target, FaultKind.KILL), trigger


def _each_trigger(targets: Collection[Target]) -> Iterator[_Case]:
    for trigger, roles in _TRIGGERED:
        yield from ((role, FaultKind.KILL, trigger) for role in roles if role in targets)


def _each_signal(targets: Collection[Target]) -> Iterator[_Case]:
    for target in targets:
        if target not in _OTHER_KINDS:
            yield from ((target, signal, Trigger.ANY) for signal in _SIGNALS)


def _fault(case: _Case, draw: Random) -> Fault:
    target, kind, trigger = case
    seconds: float | None = None
    if kind is FaultKind.STOP:
        is_for_ever = draw.random() < 0.5 and target in _REPLACED
        seconds = None if is_for_ever else draw.uniform(*_STOP_S)
    elif kind is FaultKind.SCALE:
        seconds = draw.uniform(*_SCALED_S)
    elif kind is FaultKind.FILL:
        seconds = draw.uniform(*_FULL_S)
    elif kind is FaultKind.LOSE:
        seconds = draw.uniform(*_LOST_S)
    elif kind is FaultKind.CUT:
        seconds = draw.uniform(*_CUT_S)
    elif kind is FaultKind.JUMP:
        seconds = draw.choice(_JUMPS_S)
    elif target is Target.GCS_ON_REDIS:
        seconds = draw.uniform(*_DOWN_S)
    delay_s, choice = draw.uniform(*_DELAY_S), draw.random()
    return Fault(number=0, target=target, kind=kind, trigger=trigger, delay_s=delay_s, choice=choice, seconds=seconds)
