"""The ledger of groups: a pure state machine, the heart of the coordinator.

The learner pulls and is the only clock. Groups live in portions (see `PortionKey`); each portion goes

    waiting -> running -> ready -> trained        or        -> failed (after `max_attempts` tries)

and so each group ends trained or failed-and-counted. A portion of round r may run once round r - S - 1 has been
published, S being the staleness bound: B = (S + 1) * P groups bound what is in flight, and a slot is held from
admission until the round that used it has published. S = 0 is exactly synchronous. There is no second queue.

So no completion is trained on that is more than S versions old: let version v be what round v trains. A portion of
round r first runs after round r - S - 1 has published version r - S, so the version that it is pinned to, the newest
then, is at least r - S, and at most r, for round r has not been trained. What takes a portion back pins it anew, to a
newer version; what makes the ledger anew (a restart at round n) begins at version n, and its portions are of rounds n
to n + S.

A round that replaces groups (`actors/training/choosing.py`) is extended while it is sampled, and has that many more in
flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from actors.messages import PortionKey


@dataclass(slots=True)
class _Progress:
    """Where one portion stands."""

    attempts: int = 0
    version: int | None = None
    """Pinned when it first runs, so that a second try gives the same text."""


@dataclass(slots=True)
class Ledger:
    """What is waiting, running, ready and failed."""

    num_rounds: int
    """Rounds of the run."""
    portions_per_round: int
    """Portions of a round, before it is extended."""
    max_staleness: int
    """S."""
    max_attempts: int
    """Tries of a portion."""
    next_round: int
    """The first round that has not been published."""
    version: int
    """The newest published policy version."""
    num_retries: int = 0
    """Tries beyond the first, since the learner group last started."""
    _waiting: dict[PortionKey, _Progress] = field(default_factory=dict)
    _order: list[tuple[int, int]] = field(default_factory=list)
    """A heap of what is waiting: there may be thousands."""
    _running: dict[PortionKey, _Progress] = field(default_factory=dict)
    _ready: set[PortionKey] = field(default_factory=set)
    _failed: set[PortionKey] = field(default_factory=set)
    _sizes: dict[int, int] = field(default_factory=dict)
    """Portions of each admitted round."""
    _num_done: Counter[int] = field(default_factory=Counter)
    """Those of them that are ready or failed."""
    _admitted: int = 0

    def __post_init__(self) -> None:
        self._admitted = self.next_round
        self._admit()

    def start_next(self) -> tuple[PortionKey, int] | None:
        """Take the next portion to run, oldest round first, and the policy version it is sampled from."""
        if not self._waiting:
            return None
        round_index, index = heappop(self._order)
        key = PortionKey(round=round_index, index=index)
        progress = self._waiting.pop(key)
        progress.attempts += 1
        if progress.version is None:
            progress.version = self.version
        self._running[key] = progress
        return key, progress.version

    def finish(self, key: PortionKey) -> bool:
        """A portion came back scored. False for one that nobody waits for any more."""
        if self._running.pop(key, None) is None:
            return False
        self._ready.add(key)
        self._num_done[key.round] += 1
        return True

    def fail(self, key: PortionKey) -> int | None:
        """A try of a portion failed. Its number, or None for a portion that nobody waits for any more."""
        progress = self._running.pop(key, None)
        if progress is None:
            return None
        if progress.attempts < self.max_attempts:
            self._wait(key, progress)
            self.num_retries += 1
        else:
            self._failed.add(key)
            self._num_done[key.round] += 1
        return progress.attempts

    def release(self, key: PortionKey) -> None:
        """A try ended through no fault of the portion: its version is lost. The next one is of the newest version."""
        progress = self._running.pop(key, None)
        if progress is not None:
            self._wait(key, _Progress(attempts=progress.attempts - 1))

    def redo(self, round_index: int) -> None:
        """What was ready of a round is lost: it is waiting again."""
        for key in self.ready(round_index):
            self._ready.remove(key)
            self._num_done[round_index] -= 1
            self._wait(key, _Progress())

    def extend(self, round_index: int, num_portions: int) -> None:
        """A round turns out to need so many portions; it keeps those that it has."""
        for index in range(self._sizes[round_index], num_portions):
            self._wait(PortionKey(round=round_index, index=index), _Progress())
        self._sizes[round_index] = max(self._sizes[round_index], num_portions)

    def is_complete(self, round_index: int) -> bool:
        """Whether every portion of a round is ready or failed."""
        return self._num_done[round_index] == self._sizes.get(round_index)

    def ready(self, round_index: int) -> list[PortionKey]:
        """The ready portions of a round, in their order."""
        return _of_round(self._ready, round_index)

    def counts(self) -> dict[str, int]:
        """Portions by state."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "ready": len(self._ready),
            "failed": len(self._failed),
        }

    def unfinished(self, round_index: int) -> list[PortionKey]:
        """The portions of a round that are neither ready nor failed, in their order."""
        return _of_round((*self._waiting, *self._running), round_index)

    def publish(self, round_index: int, version: int) -> None:
        """The learner trained on a round and published: its slots are free. Only the next round can publish."""
        if round_index != self.next_round:
            raise ValueError(f"round {round_index} published, but round {self.next_round} is next")
        self._ready = {key for key in self._ready if key.round != round_index}
        self._failed = {key for key in self._failed if key.round != round_index}
        self._sizes.pop(round_index)
        self._num_done.pop(round_index)
        self.next_round, self.version = round_index + 1, version
        self._admit()

    def _wait(self, key: PortionKey, progress: _Progress) -> None:
        self._waiting[key] = progress
        heappush(self._order, (key.round, key.index))

    def _admit(self) -> None:
        end = min(self.next_round + self.max_staleness + 1, self.num_rounds)
        for round_index in range(self._admitted, end):
            self._sizes[round_index] = 0
            self.extend(round_index, self.portions_per_round)
        self._admitted = max(self._admitted, end)


def _of_round(keys: Iterable[PortionKey], round_index: int) -> list[PortionKey]:
    return sorted((key for key in keys if key.round == round_index), key=lambda key: key.index)
