"""Run history: rounds that a resumed run repeated count once."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deploy.runs.history import read_history

Events = list[dict[str, Any]]


def test_a_whole_run(events: Events) -> None:
    history = read_history(events)
    assert history.name == "tiny"
    assert list(history.rounds) == list(range(12))
    assert len(history.steps["sft"]) == 10
    assert len(history.steps["control"]) == 23
    assert [item.label for item in history.evaluations] == ["untrained", "sft", "round", "rl", "control"]
    assert list(history.checkpoints) == ["checkpoints/sft", "checkpoints/rl-000012"]
    assert history.is_finished
    assert history.seconds == events[-1]["time_s"]


def test_rounds_after_the_checkpoint_that_a_run_resumed_from_are_dropped(recorder: Any) -> None:
    for index in range(6):
        recorder.round(index, 0.1)
        if index in (1, 4):
            recorder.evaluation("round", 100, index + 1)
    recorder.round(3, 0.9)
    history = read_history(recorder.events)
    assert history.series("reward") == [0.1, 0.1, 0.1, 0.9]
    assert [item.round for item in history.evaluations] == [2]


def test_the_accuracy_curve_uses_validation_if_there_is_one(recorder: Any) -> None:
    recorder.evaluation("validation", 50)
    recorder.evaluation("sft", 60)
    for index in range(4):
        recorder.round(index, 0.1)
        if index in (1, 3):
            recorder.evaluation("validation", 100 + index, index + 1)
    recorder.round(2, 0.1)
    recorder.evaluation("rl", 90, 3)
    recorder.evaluation("control", 70, 3)
    history = read_history(recorder.events)
    assert [(item.round, item.score.num_correct) for item in history.accuracy_curve] == [(0, 50), (2, 101)]
    assert [item.label for item in history.heldout] == ["sft", "rl"]


def test_without_validation_the_curve_is_held_out_accuracy(events: Events) -> None:
    history = read_history(events)
    assert history.accuracy_curve == history.heldout
    assert [item.label for item in history.accuracy_curve] == ["untrained", "sft", "round", "rl"]


def test_a_restarted_stage_discards_its_first_attempt(recorder: Any) -> None:
    recorder.sft_steps("sft", 30, planned=100)
    recorder.sft_steps("sft", 10, planned=100)
    history = read_history(recorder.events)
    assert [step["step"] for step in history.steps["sft"]] == [10]
    assert [(item["step"], item["loss"]) for item in history.sft_losses["sft"]] == [(0, 5.0), (10, 1.5)]


def test_a_run_that_went_on_after_its_end_is_not_finished(events: Events, recorder: Any) -> None:
    recorder.add("phase", phase="rl", num_steps=20)
    assert not read_history(events).is_finished


def test_no_events_give_an_empty_history() -> None:
    history = read_history([])
    assert history.seconds == 0
    assert not history.is_finished


LEARNER_DIED = "a learner worker failed: RuntimeError: Connection reset by peer"
RESTARTED = "the learner group restarted from checkpoint sft"
SAMPLER_DIED = "a sampler failed: The actor is temporarily unavailable"


def _num_failures(recorder: Any, *whats: str, attempt: int = 1) -> int:
    for what in whats:
        if what == "phase":
            recorder.add("phase", phase="rl", num_steps=20)
        else:
            recorder.add("failure", what=what, attempt=attempt)
    return read_history(recorder.events).num_failures


def test_a_learners_death_counts_once(recorder: Any) -> None:
    assert _num_failures(recorder, LEARNER_DIED, LEARNER_DIED, RESTARTED, "phase") == 1
    assert _num_failures(recorder, RESTARTED, "phase") == 2, "killed without a word"
    assert _num_failures(recorder, LEARNER_DIED, RESTARTED, LEARNER_DIED, RESTARTED) == 4, "twice, before any training"


def test_the_death_of_a_learner_in_a_resumed_run_is_another_one(recorder: Any) -> None:
    assert _num_failures(recorder, LEARNER_DIED, "phase", LEARNER_DIED) == 2


def test_other_failures_count_each_unless_they_needed_no_retry(recorder: Any) -> None:
    assert _num_failures(recorder, SAMPLER_DIED, SAMPLER_DIED) == 2
    assert _num_failures(recorder, "9 prompts are too long", attempt=0) == 2


def test_the_control_is_drawn_where_its_training_ended_had_it_begun_with_rl(recorder: Any) -> None:
    recorder.add("phase", 20, phase="rl", num_steps=9)
    recorder.round(0, 0.1)
    recorder.add("phase", 5, phase="rl", num_steps=9)  # resumed
    recorder.evaluation("rl", 90, 1)
    recorder.sft_steps("control", 30, planned=30)
    recorder.evaluation("control", 70, 1)
    of_rl, of_control = read_history(recorder.events).evaluations
    assert of_rl.drawn_s == of_rl.time_s
    assert of_control.drawn_s == 20 + 30 / 5 < of_control.time_s
    # A run without an RL stage.
    alone = [event for event in recorder.events if event.get("phase") != "rl"]
    assert read_history(alone).evaluations[1].drawn_s == of_control.time_s


def _slow_rounds(events: Events) -> tuple[dict[int, int], list[tuple[str, int]]]:
    """Return the newest place of each round and the evaluations, with a look at all of them in every round."""
    rounds: dict[int, int] = {}
    evaluations: list[tuple[str, int]] = []
    for place, event in enumerate(events):
        if event["event"] == "evaluation":
            evaluations.append((event["label"], event["round"]))
            continue
        rounds = {index: kept for index, kept in rounds.items() if index < event["round"]}
        evaluations = [one for one in evaluations if one[0] not in ("round", "validation") or one[1] <= event["round"]]
        rounds[event["round"]] = place
    return rounds, evaluations


def _evaluated(label: str, round_index: int) -> dict[str, Any]:
    counts = {"policy_version": round_index + 1, "num_correct": 1, "num_problems": 2}
    return {"event": "evaluation", "label": label, "round": round_index, "time_s": 1.0, **counts}


ROUNDS_AND_EVALUATIONS = st.lists(
    st.one_of(
        st.integers(0, 6).map(lambda index: {"event": "round", "round": index, "time_s": 1.0}),
        st.builds(_evaluated, st.sampled_from(["sft", "round", "rl", "control", "validation"]), st.integers(0, 7)),
    ),
    max_size=40,
)


@given(ROUNDS_AND_EVALUATIONS)
def test_repeated_rounds_discard_what_a_look_at_everything_discards(events: Events) -> None:
    history, (rounds, evaluations) = read_history(events), _slow_rounds(events)
    assert {index: events.index(event) for index, event in history.rounds.items()} == {
        index: events.index(events[place]) for index, place in rounds.items()
    }
    assert [(item.label, item.round) for item in history.evaluations] == evaluations


def test_the_history_of_a_long_run_takes_linear_time() -> None:
    events: Events = []
    for index in range(20_000):
        events.append({"event": "round", "round": index, "time_s": 1.0})
        if index % 4 == 3:
            events.append(_evaluated("round", index + 1))
    began = time.thread_time()
    assert len(read_history(events).evaluations) == 5000
    # Quadratic time was 12 s.
    assert time.thread_time() - began < 3
