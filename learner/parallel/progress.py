"""Progress of one rank: its activity, its place within it, and how long its next step may take.

A rank that computes or waits for ever still sends heartbeats. So it marks each forward pass and each collective here,
and its heartbeat thread reads the marks. A mark is a few assignments: it neither waits for the device nor sends
anything. The coordinator ends a rank whose next mark takes longer than its `bound_s`.

In activities with forward passes the bound is measured: `_SLOW_FACTOR` times the longest time between two marks, in the
rounds or steps before. The first of them, which may compile, and all other activities, such as a checkpoint, have a
bound for the size of the policy.

All ranks make the same marks in the same order, as they run the same forward passes and collectives. The rank with the
fewest marks is therefore the one that the others wait for.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from learner.parallel.timeouts import COLLECTIVE_TIMEOUT_S

MIN_BOUND_S = 120.0
"""Lowest bound of a measured step, in seconds: busy machines, page faults and network outages of this length are
tolerated."""
_SLOW_FACTOR = 10.0
_NUMBERS = re.compile(r"[\d.]+")
_OWN_PACKAGES = ("actors", "learner", "rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of a rank at one moment."""

    num_marks: int
    """Forward passes begun, and collectives begun or ended, since the process started. Equal places have equal
    numbers on all ranks."""
    activity: str
    """Current activity, such as `round 3: training`."""
    where: str
    """Place within it: `forward pass 5`, with the collective that the rank is in; empty at its beginning."""
    is_in_collective: bool
    """Whether the rank waits for the other ranks."""
    bound_s: float
    """Seconds that the next mark may take; infinite where the work has its own timeouts."""

    line: str = ""
    """Line of d1's code that the rank stands at, `learner.round, line 177`, if it was looked up."""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.activity, self.where, self.line and f"at {self.line}")))

    def is_same_as(self, other: Place) -> bool:
        """Whether a rank has made no progress between the two places."""
        return (self.num_marks, self.activity) == (other.num_marks, other.activity)

    def with_line(self, thread: int) -> Place:
        """Look up where the training thread stands, which also reveals collectives without marks: those of FSDP.

        It takes less than a millisecond, for a rank that has made no mark for seconds. `thread` is the id of
        `threading.get_ident`.
        """
        innermost = own = sys._current_frames().get(thread)
        while own is not None and _module(own).partition(".")[0] not in _OWN_PACKAGES:
            own = own.f_back
        # FSDP waits for other ranks in modules of this package.
        is_in_fsdp = innermost is not None and _module(innermost).startswith("torch.distributed")
        line = "" if own is None else f"{_module(own)}, line {own.f_lineno}"
        return replace(self, line=line, is_in_collective=self.is_in_collective or is_in_fsdp)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class Progress:
    """Progress of the rank of this process. Its training thread marks, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without an activity."""
        self._clock = clock
        self.start(COLLECTIVE_TIMEOUT_S)

    def start(self, unmeasured_bound_s: float, *, may_compile: bool = False) -> None:
        """Start anew. All ranks call it at the same place, as they count their marks from there.

        Args:
            unmeasured_bound_s: bound of activities that are not measured.
            may_compile: whether any step may compile a new shape: that is then the lowest bound of all activities.
        """
        self._unmeasured_bound_s = unmeasured_bound_s
        self._min_bound_s = unmeasured_bound_s if may_compile else MIN_BOUND_S
        self._activity, self._kind, self._collective = "", "", ""
        self._num_marks, self._num_passes, self._is_bounded = 0, 0, True
        self._marked_at, self._current_s = self._clock(), 0.0
        # Longest time between two marks, by kind of activity: that of the first occurrence until the second has ended,
        # and of all later ones from then on.
        self._slowest_s: dict[str, float] = {}
        self._num_ended: dict[str, int] = {}

    def begin(self, activity: str) -> None:
        """Begin an activity, unless it is the current one. Its kind is its text without numbers."""
        if activity == self._activity:
            return
        self._measure()
        self._end()
        self._activity, self._kind, self._num_passes = activity, _NUMBERS.sub("#", activity), 0

    def mark_forward(self) -> None:
        """Mark the begin of a forward pass."""
        self._measure()
        self._num_marks += 1
        self._num_passes += 1

    @contextmanager
    def in_collective(self, name: str) -> Iterator[None]:
        """Mark begin and end of a collective."""
        self._measure()
        self._num_marks += 1
        self._collective = name
        yield
        # Not after an error: the rank ends in that place.
        self._measure()
        self._num_marks += 1
        self._collective = ""

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Set no bound for the block, whose work has its own timeouts, such as waiting for completions."""
        self._is_bounded = False
        try:
            yield
        finally:
            self._is_bounded, self._marked_at = True, self._clock()

    @property
    def place(self) -> Place:
        """The current place."""
        parts = (
            f"forward pass {self._num_passes}" if self._num_passes else "",
            f"in {self._collective}" if self._collective else "",
        )
        return Place(
            num_marks=self._num_marks,
            activity=self._activity,
            where=", ".join(filter(None, parts)),
            is_in_collective=bool(self._collective),
            bound_s=self._bound_s() if self._is_bounded else float("inf"),
        )

    def _bound_s(self) -> float:
        if not self._num_ended.get(self._kind):
            return self._unmeasured_bound_s
        return max(self._min_bound_s, _SLOW_FACTOR * max(self._slowest_s[self._kind], self._current_s))

    def _measure(self) -> None:
        now = self._clock()
        if self._is_bounded:
            self._current_s = max(self._current_s, now - self._marked_at)
        self._marked_at = now

    def _end(self) -> None:
        """End the current activity. It is measured if it ran forward passes."""
        if not self._num_passes:
            self._current_s = 0.0
            return
        kind, num_ended = self._kind, self._num_ended.get(self._kind, 0)
        # The first occurrence may have compiled, and is replaced by the second.
        before_s = self._slowest_s.get(kind, 0.0) if num_ended > 1 else 0.0
        self._slowest_s[kind] = max(before_s, self._current_s)
        self._num_ended[kind], self._current_s = num_ended + 1, 0.0


PROGRESS = Progress()
"""Progress of this process, which is one rank, as for `torch.distributed`."""
