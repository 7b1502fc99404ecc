"""Ledger of work units: a pure state machine for retries and bounded staleness.

Only what the learner publishes admits new rounds. Groups are sampled in work units (`WorkUnitKey`), each of which goes

    waiting -> running -> ready -> trained        or        -> failed (after `max_attempts` attempts)

so that each group ends as trained on, or as failed and counted. A work unit of round r may run once round r - S - 1 has
been published, where S is the staleness bound. So at most (S + 1) * P groups are in flight, P being those of a round,
and a group counts from the admission of its round until the round is published. S = 0 is exactly synchronous. There is
no second queue.

Therefore no completion is trained on that is more than S versions old. Let version v be the policy that round v starts
from. A work unit of round r first runs after round r - S - 1 has published version r - S. It is pinned to the newest
version at that time, which is at least r - S, and at most r, because round r has not been trained. A work unit that is
taken back is pinned again, to a newer version. A new ledger, after a restart at round n, begins at version n, with work
units of rounds n to n + S.

A round that replaces groups (`actors/training/dynamic_sampling.py`) is extended while it is sampled, and has that many
more groups in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from actors.messages import WorkUnitKey


@dataclass(slots=True)
class _WorkUnitState:
    """State of one work unit."""

    attempts: int = 0
    version: int | None = None
    """Policy version, pinned at the first attempt so that the next one gives the same text."""


@dataclass(slots=True)
class Ledger:
    """Work units of the admitted rounds by state: waiting, running, ready and failed."""

    num_rounds: int
    """Rounds of the run."""
    work_units_per_round: int
    """Work units of a round, before it is extended."""
    max_staleness: int
    """S."""
    max_attempts: int
    """Attempts at a work unit."""
    next_round: int
    """The first round that has not been published."""
    version: int
    """The newest published policy version."""
    num_retries: int = 0
    """Attempts beyond the first, since this ledger was made."""
    _waiting: dict[WorkUnitKey, _WorkUnitState] = field(default_factory=dict)
    _order: list[tuple[int, int]] = field(default_factory=list)
    """A heap of the waiting work units: there may be thousands."""
    _running: dict[WorkUnitKey, _WorkUnitState] = field(default_factory=dict)
    _ready: set[WorkUnitKey] = field(default_factory=set)
    _failed: set[WorkUnitKey] = field(default_factory=set)
    _sizes: dict[int, int] = field(default_factory=dict)
    """Number of work units of each admitted round."""
    _num_done: Counter[int] = field(default_factory=Counter)
    """Number of those that are ready or failed."""
    _admitted: int = 0

    def __post_init__(self) -> None:
        self._admitted = self.next_round
        self._admit()

    def start_next(self) -> tuple[WorkUnitKey, int] | None:
        """Start the next work unit, oldest round first. Returns it with the policy version that it is sampled from."""
        if not self._waiting:
            return None
        round_index, index = heappop(self._order)
        key = WorkUnitKey(round=round_index, index=index)
        state = self._waiting.pop(key)
        state.attempts += 1
        if state.version is None:
            state.version = self.version
        self._running[key] = state
        return key, state.version

    def finish(self, key: WorkUnitKey) -> bool:
        """Mark a work unit as ready. Returns False if it is no longer running, so that its result is not needed."""
        if self._running.pop(key, None) is None:
            return False
        self._ready.add(key)
        self._num_done[key.round] += 1
        return True

    def fail(self, key: WorkUnitKey) -> int | None:
        """Count a failed attempt. Returns its number, or None if the work unit is no longer running."""
        state = self._running.pop(key, None)
        if state is None:
            return None
        if state.attempts < self.max_attempts:
            self._enqueue(key, state)
            self.num_retries += 1
        else:
            self._failed.add(key)
            self._num_done[key.round] += 1
        return state.attempts

    def release(self, key: WorkUnitKey) -> None:
        """Take back an attempt whose version was lost. It does not count, and the next uses the newest version."""
        state = self._running.pop(key, None)
        if state is not None:
            self._enqueue(key, _WorkUnitState(attempts=state.attempts - 1))

    def redo(self, round_index: int) -> None:
        """Return the ready work units of a round to waiting, because their results are lost."""
        for key in self.ready(round_index):
            self._ready.remove(key)
            self._num_done[round_index] -= 1
            self._enqueue(key, _WorkUnitState())

    def extend(self, round_index: int, num_work_units: int) -> None:
        """Grow a round to `num_work_units` work units. It never shrinks."""
        for index in range(self._sizes[round_index], num_work_units):
            self._enqueue(WorkUnitKey(round=round_index, index=index), _WorkUnitState())
        self._sizes[round_index] = max(self._sizes[round_index], num_work_units)

    def is_complete(self, round_index: int) -> bool:
        """Whether every work unit of a round is ready or failed."""
        return self._num_done[round_index] == self._sizes.get(round_index)

    def ready(self, round_index: int) -> list[WorkUnitKey]:
        """Return the ready work units of a round, in their order."""
        return _of_round(self._ready, round_index)

    def counts(self) -> dict[str, int]:
        """Return the number of work units by state."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "ready": len(self._ready),
            "failed": len(self._failed),
        }

    def unfinished(self, round_index: int) -> list[WorkUnitKey]:
        """Return the work units of a round that are neither ready nor failed, in their order."""
        return _of_round((*self._waiting, *self._running), round_index)

    def publish(self, round_index: int, version: int) -> None:
        """Drop a round that was trained on and published, and admit the next.

        Raises ValueError unless it is `next_round`.
        """
        if round_index != self.next_round:
            raise ValueError(f"round {round_index} published, but round {self.next_round} is next")
        self._ready = {key for key in self._ready if key.round != round_index}
        self._failed = {key for key in self._failed if key.round != round_index}
        self._sizes.pop(round_index)
        del self._num_done[round_index]
        self.next_round, self.version = round_index + 1, version
        self._admit()

    def _enqueue(self, key: WorkUnitKey, state: _WorkUnitState) -> None:
        self._waiting[key] = state
        heappush(self._order, (key.round, key.index))

    def _admit(self) -> None:
        end = min(self.next_round + self.max_staleness + 1, self.num_rounds)
        for round_index in range(self._admitted, end):
            self._sizes[round_index] = 0
            self.extend(round_index, self.work_units_per_round)
        self._admitted = max(self._admitted, end)


def _of_round(keys: Iterable[WorkUnitKey], round_index: int) -> list[WorkUnitKey]:
    return sorted((key for key in keys if key.round == round_index), key=lambda key: key.index)
