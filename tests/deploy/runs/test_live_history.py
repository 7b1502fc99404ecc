"""Incremental run history: a client that fetches it in parts ends up with the whole history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.runs import live_history
from deploy.runs.history import read_history
from deploy.runs.live_history import BEGINNING, Cursor, LiveHistory

Event = dict[str, Any]


@dataclass
class Follower:
    """Fetches parts as a client does, with its cursor as a string."""

    lists: dict[str, list[Any]] = field(default_factory=lambda: {"rounds": [], "steps": [], "evaluations": []})
    place: str = str(BEGINNING)

    def follow(self, live: LiveHistory) -> int:
        """Fetch parts until nothing is new. Returns their number."""
        for count in range(1, 1000):
            part = live.since(Cursor.parse(self.place))
            for name, had in self.lists.items():
                self.lists[name] = ([] if part.is_from_start else had) + getattr(part, name)
            if str(part.end) == self.place:
                return count
            self.place = str(part.end)
        raise AssertionError("it does not come to an end")


def _events(draw: random.Random) -> list[Event]:
    """Return the events of a run that is resumed often and repeats rounds."""
    events: list[Event] = [{"event": "run", "name": "tiny", "began_at": 1.7e9}]
    at = 0
    kinds = ["round", "round", "round", "back", "evaluation", "sft", "phase", "phase_end"]
    for kind in draw.choices(kinds, k=300):
        if kind == "back":
            at = max(0, at - draw.randrange(6))
        elif kind == "round":
            events.append({"event": "round", "round": at, "reward": draw.random()})
            at += 1
        elif kind == "evaluation":
            label = draw.choice(["round", "validation", "sft", "rl", "control"])
            score = {"num_correct": draw.randrange(1000), "num_problems": 1000}
            events.append({"event": "evaluation", "label": label, "round": at, **score})
        elif kind == "sft":
            events.append({"event": "sft", "phase": draw.choice(["sft", "control"]), "step": at, "loss": 1.0})
        elif kind == "phase":
            resumed = draw.choice([{}, {"from_step": at}])
            phase = draw.choice(["sft", "rl", "control"])
            events.append({"event": "phase", "phase": phase, "num_steps": 9, **resumed})
        else:
            events.append({"event": "phase_end", "phase": draw.choice(["rl", "control"]), "seconds": 1.0})
    return [{**event, "time_s": float(index)} for index, event in enumerate(events)]


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(live_history, "MAX_ITEMS", draw.choice([1, 3, 1000]))
    events, live, follower = _events(draw), LiveHistory(), Follower()
    end = 0
    while end < len(events):
        begin, end = end, end + draw.randrange(1, 12)
        live.add(events[begin:end])
        follower.follow(live)
        whole = read_history(events[:end])
        assert follower.lists == {
            "rounds": list(whole.rounds.values()),
            "steps": whole.steps.get("sft", []),
            "evaluations": whole.evaluations,
        }


def _round(index: int) -> Event:
    return {"event": "round", "round": index, "time_s": float(index)}


def test_what_was_had_is_not_told_again() -> None:
    live = LiveHistory()
    live.add(map(_round, range(5)))
    seen = live.since(BEGINNING).end
    live.add([_round(5)])
    part = live.since(seen)
    assert (part.is_from_start, part.rounds) == (False, [_round(5)])
    assert live.since(part.end).end == part.end


def test_a_long_history_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_history, "MAX_ITEMS", 10)
    live, follower = LiveHistory(), Follower()
    live.add(map(_round, range(25)))
    assert follower.follow(live) == 4
    assert len(follower.lists["rounds"]) == 25


@pytest.mark.parametrize("seen", ["9.0.3.0.0", "0.9.3.0.0", "0.0.9.0.0", "0.0.0.9.0", "0.0.0.0.9"])
def test_the_place_of_another_history_is_the_beginning_of_this(seen: str) -> None:
    live = LiveHistory()
    live.add(map(_round, range(5)))
    part = live.since(Cursor.parse(seen))
    assert (part.is_from_start, len(part.rounds)) == (True, 5)


def test_an_event_that_lacks_what_its_kind_has_is_counted_and_the_rest_told() -> None:
    live = LiveHistory()
    live.add([_round(0), {"event": "round", "time_s": 1.0}, {"rouod": 1}, {"event": "evaluation", "label": "rl"}])
    live.add([_round(1)])
    assert live.num_unreadable == 3
    assert [event["round"] for event in live.since(BEGINNING).rounds] == [0, 1]
