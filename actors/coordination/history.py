"""Questions about a run's events: what is recorded already, and what a restarted learner repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.checkpoints.best import current_evaluations
from actors.messages import TrainedRound
from actors.run_log import RESTARTED, Event

# Newest events that are searched for one that is recorded a second time.
_NEWEST = 20


def since_learner_start(events: list[Event]) -> list[Event]:
    """Return the events since the current learner group started."""
    for index in range(len(events), 0, -1):
        event = events[index - 1]
        if event["event"] == "resume" or (event["event"] == "failure" and event["what"].startswith(RESTARTED)):
            return events[index:]
    return events


def has_event(events: list[Event], event: str, values: Mapping[str, Any]) -> bool:
    """Whether the newest events of the current learner group contain this one, at any time."""
    asked = json.loads(json.dumps({"event": event, **values}))
    return any(one == asked | {"time_s": one["time_s"]} for one in since_learner_start(events)[-_NEWEST:])


def has_round(events: list[Event], trained: TrainedRound) -> bool:
    """Whether the newest round of the current learner group is this one."""
    rounds = [event for event in since_learner_start(events) if event["event"] == "round"]
    asked = trained.round, trained.weights_id.version
    return bool(rounds) and (rounds[-1]["round"], rounds[-1]["policy_version"]) == asked


def has_evaluation(events: list[Event], version: int, label: str) -> bool:
    """Whether weights that the run still has were evaluated under a label."""
    asked = label, version
    return any((event["label"], event["policy_version"]) == asked for event in current_evaluations(events))


def repeated_work(events: Sequence[Event], position: Mapping[str, Any]) -> str:
    """Describe what a learner repeats that continues from a position."""
    rounds = max((event["round"] + 1 for event in events if event["event"] == "round"), default=0)
    if rounds > position["round"]:
        return _again("round", position["round"], rounds - 1)
    steps = [event for event in events if event["event"] in ("sft", "phase_end")]
    done = position["step"] or 0
    if steps and steps[-1]["event"] == "sft" and steps[-1]["step"] > done:
        return _again(f"{steps[-1]['phase']} step", done, steps[-1]["step"] - 1)
    return "nothing is repeated"


def _again(what: str, first: int, last: int) -> str:
    return f"{what} {first} is repeated" if first == last else f"{what}s {first} to {last} are repeated"
