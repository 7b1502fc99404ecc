"""Progress of the learner's ranks: which of them stand still, and which of these the others wait for.

Time is counted in heartbeats, by the coordinator's clock: a rank whose machine swaps or is stopped sends few, so its
time passes slowly here, and its silence is for `LivenessMonitor`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from learner.parallel.progress import Place

# Several times the interval of heartbeats, which is a second for up to 200 ranks. For over 600 time passes slower here.
_MAX_BETWEEN_HEARTBEATS_S = 3.0


@dataclass(slots=True)
class RankProgress:
    """Progress of one rank."""

    rank: int
    actor: Any
    """Its handle."""
    node: str
    """Host name of its machine."""
    place: Place
    """Its newest known place."""
    heard_at: float
    activity_since: float
    """When the current activity began."""
    stands_s: float = 0.0
    """Seconds without progress, in heartbeats."""

    @property
    def name(self) -> str:
        """`rank 1 on gpu-7`."""
        return f"rank {self.rank} on {self.node}"

    @property
    def is_stuck(self) -> bool:
        """Whether it has made no progress for longer than its bound."""
        return self.stands_s > self.place.bound_s

    def hear(self, actor: Any, node: str, place: Place, now: float) -> None:
        """Take over a heartbeat."""
        if place.is_same_as(self.place):
            self.stands_s += min(now - self.heard_at, _MAX_BETWEEN_HEARTBEATS_S)
        else:
            self.stands_s = 0.0
        if place.activity != self.place.activity:
            self.activity_since = now
        self.actor, self.node, self.place, self.heard_at = actor, node, place, now


def awaited(ranks: Iterable[RankProgress]) -> list[RankProgress]:
    """Return the ranks that the others wait for: the least advanced ones, and of these the ones in no collective."""
    ranks = list(ranks)
    least = min((one.place.num_marks for one in ranks), default=0)
    last = [one for one in ranks if one.place.num_marks == least]
    return [one for one in last if not one.place.is_in_collective] or last


def stuck(ranks: Iterable[RankProgress]) -> list[RankProgress]:
    """Return the ranks that others wait for, if each of them has exceeded its bound."""
    last = awaited(ranks)
    return last if all(one.is_stuck for one in last) else []


def stuck_text(ended: Iterable[RankProgress], ranks: Iterable[RankProgress]) -> str:
    """Say which ranks have made no progress, where, and where the others wait."""
    ended = list(ended)
    parts = [
        f"learner {one.name} made no progress for {one.stands_s:.0f} s, {one.place.bound_s:.0f} s are allowed: "
        f"{one.place}"
        for one in ended
    ]
    parts += [f"{one.name} waits: {one.place}" for one in ranks if one not in ended]
    return "; ".join(parts)


def standstill_texts(ranks: Iterable[RankProgress]) -> list[str]:
    """Return a sentence for each rank that others wait for and that has used up half of its bound."""
    return [
        f"learner {one.name} without progress for {one.stands_s:.0f} s, restarted after {one.place.bound_s:.0f} s: "
        f"{one.place}"
        for one in awaited(ranks)
        if one.stands_s > one.place.bound_s / 2
    ]
