"""Incremental history of a run under way: returns what is new since a client's cursor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from operator import le

from actors.run_log import Event
from deploy.runs.history import Evaluation, RunHistory

MAX_ITEMS = 1000
"""Maximum number of rounds, and of SFT steps, returned at once; the rest follows on the next request."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a client in a history."""

    began_at: int = 0
    """Start of the run, in Unix time; 0 while it has not begun."""
    num_discarded: int = 0
    """How often a resumed run had discarded parts of the history by then."""
    num_rounds: int = 0
    num_steps: int = 0
    num_evaluations: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse the text that `str` returns."""
        return cls(*map(int, text.split(".")))


BEGINNING = Cursor()
"""Cursor of a client that has nothing yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPart:
    """New part of a history."""

    is_from_start: bool
    """Whether it starts at the beginning: the client must discard what it had."""
    rounds: list[Event]
    """`round` events, ascending."""
    steps: list[Event]
    """`sft` events of SFT, in order."""
    evaluations: list[Evaluation]
    """In order."""
    end: Cursor
    """Cursor after this part."""


class LiveHistory:
    """History that grows as events are added."""

    def __init__(self) -> None:
        self.history = RunHistory()
        """The aggregated events."""
        self.num_events = 0
        """Number of events added."""
        self.num_unreadable = 0
        """Number of those that lack a field of their kind, and are ignored."""

    def add(self, events: Iterable[Event]) -> None:
        """Add the next events of the run."""
        for event in events:
            self.num_events += 1
            try:
                self.history.add(event)
            except (KeyError, TypeError):
                # The file may have a corrupt byte: its other events are still worth showing.
                self.num_unreadable += 1

    def since(self, seen: Cursor) -> HistoryPart:
        """Return what is new to a client with the cursor `seen`."""
        history = self.history
        rounds, steps = list(history.rounds.values()), history.steps.get("sft", [])
        has = (len(rounds), len(steps), len(history.evaluations))
        start = Cursor(int(history.began_at or 0), history.num_discarded)
        is_known = astuple(seen)[:2] == astuple(start)[:2] and all(map(le, astuple(seen)[2:], has))
        if not is_known:
            seen = start
        rounds = rounds[seen.num_rounds :][:MAX_ITEMS]
        steps = steps[seen.num_steps :][:MAX_ITEMS]
        end = replace(
            start,
            num_rounds=seen.num_rounds + len(rounds),
            num_steps=seen.num_steps + len(steps),
            num_evaluations=len(history.evaluations),
        )
        evaluations = history.evaluations[seen.num_evaluations :]
        return HistoryPart(is_from_start=seen == start, rounds=rounds, steps=steps, evaluations=evaluations, end=end)
