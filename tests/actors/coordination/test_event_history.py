"""The history of a run's events answers as a look at all of them does."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.checkpoints.best import Evaluations
from actors.event_history import EventHistory
from actors.registry.files import history_of
from actors.run_log import RESTARTED, VALIDATION, Event

LABELS = ("untrained", "sft", "round", "rl", "control", VALIDATION)
RESTART = {"event": "failure", "what": f"{RESTARTED} from checkpoint sft; round 1 is repeated", "time_s": 2.0}


def _round(index: int) -> Event:
    return {"event": "round", "round": index, "policy_version": index + 2, "time_s": 1.0}


def _evaluation(label: str, version: int, num_correct: int) -> Event:
    counts = {"policy_version": version, "num_correct": num_correct, "num_problems": 9}
    return {"event": "evaluation", "label": label, **counts, "time_s": 1.0}


EVENTS = st.lists(
    st.one_of(
        st.integers(0, 5).map(_round),
        st.builds(_evaluation, st.sampled_from(LABELS), st.integers(0, 7), st.integers(0, 9)),
        st.integers(0, 9).map(lambda step: {"event": "sft", "phase": "sft", "step": step, "time_s": 1.0}),
        st.sampled_from(
            [
                RESTART,
                {"event": "resume", "what": "", "time_s": 1.0},
                {"event": "failure", "what": "a sampler failed", "attempt": 1, "time_s": 1.0},
                {"event": "phase", "phase": "rl", "time_s": 1.0},
                {"event": "phase_end", "phase": "sft", "time_s": 1.0},
                {"event": "run", "began_at": 7.0, "time_s": 0.0},
                {"event": "done", "time_s": 1.0},
            ]
        ),
    ),
    max_size=40,
)


def _history(events: Sequence[Event]) -> EventHistory:
    history = EventHistory()
    for event in events:
        history.add(event)
    return history


# The slow reference: each question looks at all events.


def _since_learner_start(events: Sequence[Event]) -> Sequence[Event]:
    for index in range(len(events), 0, -1):
        event = events[index - 1]
        if event["event"] == "resume" or (event["event"] == "failure" and event["what"].startswith(RESTARTED)):
            return events[index:]
    return events


def _has_event(events: Sequence[Event], event: str, values: Mapping[str, Any]) -> bool:
    asked = json.loads(json.dumps({"event": event, **values}))
    return any(one == asked | {"time_s": one["time_s"]} for one in _since_learner_start(events)[-20:])


def _has_round(events: Sequence[Event], round_index: int, version: int) -> bool:
    rounds = [event for event in _since_learner_start(events) if event["event"] == "round"]
    return bool(rounds) and (rounds[-1]["round"], rounds[-1]["policy_version"]) == (round_index, version)


def _current_evaluations(events: Sequence[Event]) -> list[Event]:
    current, later = [], math.inf
    for event in reversed(events):
        if event["event"] == "round":
            later = min(later, event["policy_version"])
        elif event["event"] == "evaluation" and event["policy_version"] < later:
            current.append(event)
    return current[::-1]


def _best_version(events: Sequence[Event]) -> int | None:
    has_validation = any(event["event"] == "evaluation" and event["label"] == VALIDATION for event in events)
    labels = (VALIDATION,) if has_validation else ("round", "rl")
    found = {
        event["policy_version"]: event["num_correct"] / event["num_problems"]
        for event in _current_evaluations(events)
        if event["label"] in labels
    }
    return max(found, key=lambda version: (found[version], -version), default=None)


def _repeated_rounds(events: Sequence[Event]) -> int:
    return max((event["round"] + 1 for event in events if event["event"] == "round"), default=0)


@given(EVENTS)
def test_the_history_answers_as_a_look_at_all_events(events: list[Event]) -> None:
    history, since = _history(events), _since_learner_start(events)
    assert [(one.label, one.policy_version, one.score.num_correct) for one in history.evaluations.current] == [
        (event["label"], event["policy_version"], event["num_correct"]) for event in _current_evaluations(events)
    ]
    assert history.evaluations.best() == Evaluations(events).best() == _best_version(events)
    assert history.is_done == (bool(events) and events[-1]["event"] == "done")
    assert history.began_at == next((event["began_at"] for event in events if event["event"] == "run"), None)
    for index in range(6):
        assert history.has_round(index, index + 2) == _has_round(events, index, index + 2)
        assert history.has_event("sft", {"phase": "sft", "step": index}) == _has_event(
            events, "sft", {"phase": "sft", "step": index}
        )
        for label in LABELS:
            for is_of_group in (False, True):
                asked = [
                    event
                    for event in _current_evaluations(since if is_of_group else events)
                    if (event["label"], event["policy_version"]) == (label, index)
                ]
                assert history.has_evaluation(index, label, is_of_group=is_of_group) == bool(asked)
    for kind in ("round", "phase", "checkpoint", "sft"):
        assert history.num(kind) == sum(event["event"] == kind for event in events)
        assert history.newest(kind) == next((event for event in reversed(events) if event["event"] == kind), {})
    is_behind = history.repeated_work({"round": 3, "step": None}).startswith("round")
    assert is_behind == (_repeated_rounds(events) > 3)


def test_an_event_is_found_at_any_time_and_as_it_is_in_the_file() -> None:
    history = _history([{"event": "sft", "step": 3, "loss_at_t": [1.0, 2.0], "time_s": 9.0}])
    assert history.has_event("sft", {"step": 3, "loss_at_t": (1.0, 2.0)})
    assert not history.has_event("sft", {"step": 4, "loss_at_t": (1.0, 2.0)})


def test_rounds_or_steps_after_the_checkpoint_are_named() -> None:
    at = {"round": 1, "step": None}
    steps = [{"event": "sft", "phase": "control", "step": 9}]
    assert _history([_round(0), _round(1)]).repeated_work(at) == "round 1 is repeated"
    assert _history([_round(0), _round(1), _round(2)]).repeated_work(at) == "rounds 1 to 2 are repeated"
    again = _history([_round(0), *steps]).repeated_work({"round": 1, "step": 4})
    assert again == "control steps 4 to 8 are repeated"
    ended = _history([_round(0), *steps, {"event": "phase_end", "phase": "control"}])
    assert ended.repeated_work(at) == "nothing is repeated"


def _slow_versions(events: Sequence[Event]) -> list[tuple[int, int, int | None]]:
    """Return version, round and score of each published version, with a look at all of them in every round."""
    versions: dict[int, int] = {}
    for event in events:
        if event["event"] == "round":
            versions = {number: index for number, index in versions.items() if number < event["policy_version"]}
            versions[event["policy_version"]] = event["round"] + 1
    scores = {
        event["policy_version"]: event["num_correct"]
        for event in _current_evaluations(events)
        if event["label"] != "control"
    }
    return [(number, versions[number], scores.get(number)) for number in sorted(versions)]


@given(EVENTS)
def test_published_versions_are_those_of_a_look_at_all_of_them(events: list[Event]) -> None:
    found = history_of(Path("/nowhere"), events)
    assert [(one.version, one.round, one.num_correct) for one in found] == _slow_versions(events)


def test_the_versions_of_a_long_run_take_linear_time() -> None:
    events = [_round(index) for index in range(16_000)]
    began = time.thread_time()
    assert len(history_of(Path("/nowhere"), events)) == 16_000
    # Quadratic time was 8 s.
    assert time.thread_time() - began < 2
