"""A run's history while it grows: what is new of it since somebody looked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from operator import le

from actors.run_log import Event
from deploy.runs.history import Evaluation, RunHistory

MAX_ITEMS = 1000
"""So many rounds, and so many steps of SFT, are told at once; the rest the next time."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What somebody has of a history."""

    began_at: int = 0
    """When the run began, in seconds since 1970; 0 while it has not."""
    num_forgotten: int = 0
    """How often the run had forgotten something of it by then."""
    num_rounds: int = 0
    num_steps: int = 0
    num_evaluations: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Of the text that `str` makes."""
        return cls(*map(int, text.split(".")))


BEGINNING = Cursor()
"""Of who has nothing of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPart:
    """What is new of a history."""

    is_whole: bool
    """Whether it begins at the beginning: what was had of it before counts no more."""
    rounds: list[Event]
    """`round` events, ascending."""
    steps: list[Event]
    """`sft` events of SFT, in order."""
    evaluations: list[Evaluation]
    """In order."""
    end: Cursor
    """What is had with it."""


class LiveHistory:
    """A history to which events are added."""

    def __init__(self) -> None:
        self.history = RunHistory()
        """What they have come to."""
        self.num_events = 0
        """Those added."""
        self.num_unreadable = 0
        """Those of them that lack what their kind has, and count for nothing."""

    def add(self, events: Iterable[Event]) -> None:
        """The next events of the run."""
        for event in events:
            self.num_events += 1
            try:
                self.history.add(event)
            except (KeyError, TypeError):
                # A file with a flipped byte: what else it tells is worth seeing.
                self.num_unreadable += 1

    def since(self, seen: Cursor) -> HistoryPart:
        """What is new to somebody who has seen so much."""
        history = self.history
        rounds, steps = list(history.rounds.values()), history.steps.get("sft", [])
        has = (len(rounds), len(steps), len(history.evaluations))
        start = Cursor(int(history.began_at or 0), history.num_forgotten)
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
        return HistoryPart(is_whole=seen == start, rounds=rounds, steps=steps, evaluations=evaluations, end=end)
