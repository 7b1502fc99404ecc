"""How a run stands at this moment, and who waits for whom: for the driver's screen, and for others in `status.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from actors.messages import PortionKey
from actors.plan import EVALUATION_ROUND
from actors.pools import Assignment

STATUS = "status.json"


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
    assignments: tuple[str, ...]
    """Who is at work on which portion: `sampler 1: portion 12:1 for 3 s`."""
    waits: tuple[str, ...]
    """Who waits for whom for longer than usual, in sentences; empty while all goes well."""
    max_staleness: int
    """How many versions older than the learner's a completion may be."""
    staleness: float
    """How many they were in the newest round, on the mean."""
    num_restarts: Mapping[str, int]
    """Restarts since this driver began: of the coordinator, of the learner group."""
    seconds: Mapping[str, float]
    """Of the newest round: sampling, training, publish."""

    def write(self, directory: Path) -> None:
        """Keep it in the run directory, whole or not at all; a disk that is full leaves the older one."""
        beside = directory / f".{STATUS}.new"
        try:
            beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
            os.replace(beside, directory / STATUS)
        except OSError:
            return

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """What a run last said of itself; None where it has said nothing yet."""
        try:
            values = json.loads((directory / STATUS).read_text(encoding="utf-8"))
            return cls(**values | {name: tuple(values[name]) for name in ("assignments", "waits")})
        except (OSError, ValueError, TypeError, KeyError):
            return None


def portion_name(key: PortionKey) -> str:
    """A portion for people: `portion 12:1`, or `evaluation portion 3`."""
    return f"evaluation portion {key.index}" if key.round == EVALUATION_ROUND else f"portion {key.round}:{key.index}"


def assignment_text(assignment: Assignment) -> str:
    """`sampler 1: portion 12:1 for 3 s`."""
    return f"{assignment.actor}: {portion_name(assignment.key)} for {assignment.seconds:.0f} s"


def silence_texts(silent: Mapping[str, float], assignments: Iterable[Assignment]) -> list[str]:
    """A sentence for each actor that is silent: for how long, and what waits for it."""
    waiting = {assignment.actor: portion_name(assignment.key) for assignment in assignments}
    return [
        f"{name} silent for {seconds:.0f} s" + (f"; {waiting[name]} waits for it" if name in waiting else "")
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


_MOST_SHOWN = 4
