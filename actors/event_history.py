"""What the coordinator must know about all events of a run, in memory that does not grow with the rounds."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from actors.checkpoints.best import Evaluations
from actors.run_log import RESTARTED, Event

# Newest events that are searched for one that is recorded a second time.
_NEWEST = 20


class EventHistory:
    """Answers questions about the events so far: what is recorded already, and what a restarted learner repeats."""

    def __init__(self, *, is_restarted: bool = False) -> None:
        """Begin without events. `is_restarted`: an earlier coordinator may have died as it answered a call, which Ray
        then repeats."""
        self.is_restarted = is_restarted
        self.evaluations = Evaluations()
        self.began_at: float | None = None
        """When the run began (unix time), which distinguishes runs of the same name; None if no event says so."""
        self.is_done = False
        """Whether the run completed and nothing was added since."""
        self._num: Counter[str] = Counter()
        self._newest: dict[str, Event] = {}
        self._num_rounds = 0
        self._last_step: Event | None = None
        self._of_group = _GroupHistory()

    def add(self, event: Event) -> None:
        """Add the next event."""
        kind = event["event"]
        if kind == "run" and not self._num["run"]:
            self.began_at = event.get("began_at")
        elif kind == "round":
            self._num_rounds = max(self._num_rounds, event["round"] + 1)
        elif kind in ("sft", "phase_end"):
            self._last_step = event
        self._num[kind] += 1
        self._newest[kind] = event
        self.is_done = kind == "done"
        self.evaluations.add(event)
        if kind == "resume" or (kind == "failure" and event["what"].startswith(RESTARTED)):
            self._of_group = _GroupHistory()
        else:
            self._of_group.add(event)

    def num(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return self._num[kind]

    def newest(self, kind: str) -> Event:
        """Return the newest event of a kind; empty if there is none."""
        return self._newest.get(kind, {})

    def has_event(self, event: str, values: Mapping[str, Any]) -> bool:
        """Whether the newest events of the current learner group contain this one, at any time."""
        asked = json.loads(json.dumps({"event": event, **values}))
        return any(one == asked | {"time_s": one["time_s"]} for one in self._of_group.newest)

    def has_round(self, round_index: int, version: int) -> bool:
        """Whether the newest round of the current learner group is this one, which published that version."""
        newest = self._of_group.newest_round
        return (newest.get("round"), newest.get("policy_version")) == (round_index, version)

    def has_evaluation(self, version: int, label: str, *, is_of_group: bool) -> bool:
        """Whether weights that the run still has were evaluated under a label; with `is_of_group`, since the current
        learner group started."""
        evaluations = self._of_group.evaluations if is_of_group else self.evaluations
        return any((one.label, one.policy_version) == (label, version) for one in evaluations.current)

    def is_repeated(self, event: str, values: Mapping[str, Any]) -> bool:
        """Whether a call that records this event is one that Ray repeats."""
        return self.is_restarted and self.has_event(event, values)

    def is_evaluated(self, version: int, label: str, *, is_new: bool) -> bool:
        """Whether a version needs no evaluation under a label. For a new one only events since the learner started
        count, and only those of a repeated call."""
        return (self.is_restarted or not is_new) and self.has_evaluation(version, label, is_of_group=is_new)

    def repeated_work(self, position: Mapping[str, Any]) -> str:
        """Describe what a learner repeats that continues from a position."""
        if self._num_rounds > position["round"]:
            return _again("round", position["round"], self._num_rounds - 1)
        last, done = self._last_step, position["step"] or 0
        if last is not None and last["event"] == "sft" and last["step"] > done:
            return _again(f"{last['phase']} step", done, last["step"] - 1)
        return "nothing is repeated"


class _GroupHistory:
    """Events since the current learner group started."""

    def __init__(self) -> None:
        self.newest: deque[Event] = deque(maxlen=_NEWEST)
        self.newest_round: Event = {}
        self.evaluations = Evaluations()

    def add(self, event: Event) -> None:
        self.newest.append(event)
        self.evaluations.add(event)
        if event["event"] == "round":
            self.newest_round = event


def _again(what: str, first: int, last: int) -> str:
    return f"{what} {first} is repeated" if first == last else f"{what}s {first} to {last} are repeated"
