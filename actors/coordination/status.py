"""How a run stands at this moment, and who waits for whom: for the driver's screen, and for others in `status.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actors.whole_file import write_whole

if TYPE_CHECKING:
    # `d1 status` reads what is written here, and does not wait for torch and Ray.
    from actors.coordination.pool import Assignment
    from actors.messages import PortionKey

STATUS = "status.json"
SILENT_S = 15.0
"""Seconds without an answer after which somebody is told."""
HUNG_S = 45.0
"""Seconds without an answer after which an actor is ended, so that Ray starts another in its place."""
_MOST_SHOWN = 4


class ActorState(StrEnum):
    """How a sampler or a grader stands."""

    BUSY = "busy"
    IDLE = "idle"
    AWAY = "away"
    """It does not answer: it restarts, or is still at a call that was given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorStatus:
    """A sampler or a grader at one moment."""

    name: str
    """`sampler 1`."""
    state: ActorState
    """How it stands."""
    portion: str
    """What it has, `portion 12:1`; empty where it has none."""
    seconds: float
    """For how long it has had that, or has been away; 0 where it is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run at one moment."""

    at: float
    """Unix time."""
    stage: str
    """The stage under way: untrained, sft, rl or control."""
    round: int
    """The round under way, from 0; in other stages the rounds trained."""
    num_rounds: int
    """Rounds of the run."""
    policy_version: int
    """The newest published version."""
    learner: Mapping[str, str]
    """What each rank of the learner is at, by rank."""
    portions: Mapping[str, int]
    """Portions in flight by state: waiting, running, ready, failed."""
    pools: tuple[ActorStatus, ...]
    """The samplers and the graders."""
    waits: tuple[str, ...]
    """Who waits for whom for longer than usual, in sentences; empty while all goes well."""
    max_staleness: int
    """How many versions older than the learner's a completion may be."""
    staleness: float
    """How many they were in the newest round, on the mean."""
    num_restarts: Mapping[str, int]
    """Of the coordinator and the learner group since this driver began; of samplers, graders and weight store since the
    coordinator last started."""
    seconds: Mapping[str, float]
    """Of the newest round: sampling, training, publish."""

    def write(self, directory: Path) -> None:
        """Keep it in the run directory, whole or not at all; a disk that is full leaves the older one."""
        write_whole(directory / STATUS, json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """What a run last said of itself; None where it has said nothing yet."""
        try:
            values = json.loads((directory / STATUS).read_text(encoding="utf-8"))
            pools = tuple(ActorStatus(**actor | {"state": ActorState(actor["state"])}) for actor in values.pop("pools"))
            return cls(pools=pools, waits=tuple(values.pop("waits")), **values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def portion_name(key: PortionKey) -> str:
    """A portion for people: `portion 12:1`, or `evaluation portion 3`."""
    return f"evaluation portion {key.index}" if key.is_of_evaluation else f"portion {key.round}:{key.index}"


def actor_statuses(
    names: Iterable[str], assignments: Iterable[Assignment], away: Mapping[str, float]
) -> tuple[ActorStatus, ...]:
    """How each of `names` stands, by who has what, and who is away for how many seconds."""
    by_name = {assignment.actor: assignment for assignment in assignments}
    statuses = []
    for name in names:
        state, portion, seconds = ActorState.IDLE, "", 0.0
        if name in by_name:
            state, portion, seconds = ActorState.BUSY, portion_name(by_name[name].key), by_name[name].seconds
        elif name in away:
            state, seconds = ActorState.AWAY, away[name]
        statuses.append(ActorStatus(name=name, state=state, portion=portion, seconds=round(seconds, 3)))
    return tuple(statuses)


def restarts_by_kind(num_restarts: Mapping[str, int]) -> dict[str, int]:
    """Restarts of samplers, of graders and of the weight store, of those by actor; none where there were none."""
    kinds: Counter[str] = Counter()
    for name, count in num_restarts.items():
        kind, _, number = name.rpartition(" ")
        kinds[f"{kind}s" if number.isdigit() else name] += count
    return dict(kinds)


def silence_texts(
    silent: Mapping[str, float], starting: Collection[str], assignments: Iterable[Assignment]
) -> list[str]:
    """A sentence for each actor that is silent: for how long, and what waits for it. Who has not been up yet, of
    `starting`, may have no place to be."""
    waiting = {assignment.actor: portion_name(assignment.key) for assignment in assignments}
    return [
        f"{name} not up after {seconds:.0f} s; has the cluster room for it? `ray status` says"
        if name in starting
        else f"{name} silent for {seconds:.0f} s" + (f"; {waiting[name]} waits for it" if name in waiting else "")
        for name, seconds in silent.items()
    ]


def wait_text(who: str, seconds: float, portions: Iterable[PortionKey], assignments: Iterable[Assignment]) -> str:
    """What `who`, who waits for portions, waits for: who has each of them, and for how long."""
    by_key: dict[PortionKey, Any] = {assignment.key: assignment for assignment in assignments}
    parts = [
        f"{portion_name(key)} ({by_key[key].actor}, {by_key[key].seconds:.0f} s)"
        if key in by_key
        else f"{portion_name(key)} (nobody is free)"
        for key in portions
    ]
    shown = ", ".join(parts[:_MOST_SHOWN]) + (
        f" and {len(parts) - _MOST_SHOWN} more" if len(parts) > _MOST_SHOWN else ""
    )
    return f"{who} waits for {seconds:.0f} s: {shown}"
