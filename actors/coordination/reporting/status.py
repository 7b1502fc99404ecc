"""Current status of a run, and what it waits for: on the driver's screen, and in `status.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actors.files.atomic_file import write_atomically

if TYPE_CHECKING:
    # `d1 status` reads the file with this module, and must not import torch and Ray.
    from actors.messages import WorkUnitKey

STATUS = "status.json"
SILENT_S = 15.0
"""Seconds without an answer after which an actor is reported as silent."""
HUNG_S = 45.0
"""Seconds without an answer after which an actor is ended, so that Ray starts another in its place."""
_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Current work unit of an actor of a pool."""

    actor: str
    """Its name: `sampler 1`."""
    key: WorkUnitKey
    """The work unit."""
    seconds: float
    """Time since it was assigned."""


class ActorState(StrEnum):
    """State of a sampler or a grader."""

    BUSY = "busy"
    IDLE = "idle"
    UNREACHABLE = "unreachable"
    """Unreachable: it restarts, or is still in a call that timed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorStatus:
    """Status of a sampler or a grader at one moment."""

    name: str
    """`sampler 1`."""
    state: ActorState
    """Its state."""
    work_unit: str
    """Its work unit, `work unit 12:1`; empty if it has none."""
    seconds: float
    """For how long it has had that, or has been unreachable; 0 if it is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """Status of a run at one moment."""

    at: float
    """Unix time."""
    stage: str
    """The stage under way: untrained, sft, rl or control."""
    round: int
    """The current round, from 0; in other stages the number of rounds trained."""
    num_rounds: int
    """Rounds of the run."""
    policy_version: int
    """The newest published version."""
    learner: Mapping[str, str]
    """Current activity of each rank of the learner, by rank."""
    work_units: Mapping[str, int]
    """Number of work units in flight by state: waiting, running, ready, failed."""
    pools: tuple[ActorStatus, ...]
    """The samplers and the graders."""
    waits: tuple[str, ...]
    """Sentences about waits that are longer than usual; empty if there are none."""
    max_staleness: int
    """Maximum staleness of a completion: how many versions older than the learner's it may be."""
    staleness: float
    """Mean staleness in the newest round."""
    num_restarts: Mapping[str, int]
    """Restarts of the coordinator and the learner group since this driver began, and of samplers, graders and weight
    store since the coordinator last started."""
    seconds: Mapping[str, float]
    """Durations in the newest round: sampling, training, publish."""
    log: Mapping[str, float] = field(default_factory=dict)
    """The fields of `actors.run_log.Backlog`. Empty in a status of an earlier release of d1."""

    def write(self, directory: Path) -> None:
        """Write it to the run directory atomically. On a full disk the older file stays."""
        write_atomically(directory / STATUS, json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the last status of a run; None if there is none, or if it cannot be read."""
        try:
            values = json.loads((directory / STATUS).read_text(encoding="utf-8"))
            pools = tuple(ActorStatus(**actor | {"state": ActorState(actor["state"])}) for actor in values.pop("pools"))
            return cls(pools=pools, waits=tuple(values.pop("waits")), **values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def work_unit_name(key: WorkUnitKey) -> str:
    """Return the readable name of a work unit: `work unit 12:1`, or `evaluation work unit 3`."""
    return f"evaluation work unit {key.index}" if key.is_of_evaluation else f"work unit {key.round}:{key.index}"


def actor_statuses(
    names: Iterable[str], assignments: Iterable[Assignment], unreachable: Mapping[str, float]
) -> tuple[ActorStatus, ...]:
    """Return the status of each of `names`, from assignments and from the seconds that actors were unreachable."""
    by_name = {assignment.actor: assignment for assignment in assignments}
    statuses = []
    for name in names:
        state, work_unit, seconds = ActorState.IDLE, "", 0.0
        if name in by_name:
            state, work_unit, seconds = ActorState.BUSY, work_unit_name(by_name[name].key), by_name[name].seconds
        elif name in unreachable:
            state, seconds = ActorState.UNREACHABLE, unreachable[name]
        statuses.append(ActorStatus(name=name, state=state, work_unit=work_unit, seconds=round(seconds, 3)))
    return tuple(statuses)


def restarts_by_kind(num_restarts: Mapping[str, int]) -> dict[str, int]:
    """Sum the restarts by actor over samplers, graders and the weight store, without zeros."""
    kinds: Counter[str] = Counter()
    for name, count in num_restarts.items():
        kind, _, number = name.rpartition(" ")
        kinds[f"{kind}s" if number.isdigit() else name] += count
    return dict(kinds)


def silence_texts(
    silent: Mapping[str, float], starting: Collection[str], assignments: Iterable[Assignment]
) -> list[str]:
    """Return a sentence for each silent actor: for how long, and which work unit waits for it. For actors in
    `starting`, which have never been up, the cluster may have no room."""
    waiting = {assignment.actor: work_unit_name(assignment.key) for assignment in assignments}
    return [
        f"{name} not up after {seconds:.0f} s; check with `ray status` that the cluster has room for it"
        if name in starting
        else f"{name} silent for {seconds:.0f} s" + (f"; {waiting[name]} waits for it" if name in waiting else "")
        for name, seconds in silent.items()
    ]


def writing_text(seconds: float, num_waiting: int) -> str:
    """Describe a write to the run directory that takes long."""
    return f"the disk of the run directory has not finished a write for {seconds:.0f} s; {num_waiting} events wait"


def wait_text(who: str, seconds: float, work_units: Iterable[WorkUnitKey], assignments: Iterable[Assignment]) -> str:
    """Describe what `who` waits for: the work units, which actor has each of them, and for how long."""
    by_key: dict[WorkUnitKey, Any] = {assignment.key: assignment for assignment in assignments}
    parts = [
        f"{work_unit_name(key)} ({by_key[key].actor}, {by_key[key].seconds:.0f} s)"
        if key in by_key
        else f"{work_unit_name(key)} (no free actor)"
        for key in work_units
    ]
    shown = ", ".join(parts[:_MOST_SHOWN]) + (
        f" and {len(parts) - _MOST_SHOWN} more" if len(parts) > _MOST_SHOWN else ""
    )
    return f"{who} has waited {seconds:.0f} s for {shown}"
