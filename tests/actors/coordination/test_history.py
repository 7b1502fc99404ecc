"""Questions about a run's events: only those since the learner started count as a repetition."""

from __future__ import annotations

from typing import Any

from actors.coordination.history import has_evaluation, has_event, has_round, repeated_work, since_learner_start
from actors.messages import TrainedRound, WeightsId
from actors.run_log import RESTARTED


def _round(index: int) -> dict[str, Any]:
    return {"event": "round", "round": index, "policy_version": index + 2, "time_s": 1.0}


RESTART = {"event": "failure", "what": f"{RESTARTED} from checkpoint sft; round 1 is repeated", "time_s": 2.0}
TRAINED = TrainedRound(round=1, weights_id=WeightsId(version=3, digest=""), values={})


def test_only_events_since_the_learner_started_can_be_repetitions() -> None:
    before = [_round(0), _round(1)]
    resumed = [*before, {"event": "resume", "what": "going on", "time_s": 2.0}]
    for events in ([*before, RESTART], resumed):
        assert has_round(before, TRAINED)
        assert not has_round(events, TRAINED), "of an earlier group"
        assert has_round([*events, _round(1)], TRAINED)
        assert since_learner_start([*events, _round(1)]) == [_round(1)]
    assert since_learner_start(before) == before


def test_an_event_is_found_at_any_time_and_as_it_is_in_the_file() -> None:
    events = [{"event": "sft", "step": 3, "loss_at_t": [1.0, 2.0], "time_s": 9.0}]
    assert has_event(events, "sft", {"step": 3, "loss_at_t": (1.0, 2.0)})
    assert not has_event(events, "sft", {"step": 4, "loss_at_t": (1.0, 2.0)})


def test_an_evaluation_of_retrained_weights_does_not_count() -> None:
    evaluation = {"event": "evaluation", "label": "rl", "policy_version": 3}
    assert has_evaluation([_round(1), evaluation], 3, "rl")
    assert not has_evaluation([_round(1), evaluation], 3, "sft")
    assert not has_evaluation([_round(1), evaluation, _round(1)], 3, "rl")


def test_rounds_or_steps_after_the_checkpoint_are_named() -> None:
    at = {"round": 1, "step": None}
    steps = [{"event": "sft", "phase": "control", "step": 9}]
    assert repeated_work([_round(0), _round(1)], at) == "round 1 is repeated"
    assert repeated_work([_round(0), _round(1), _round(2)], at) == "rounds 1 to 2 are repeated"
    assert repeated_work([_round(0), *steps], {"round": 1, "step": 4}) == "control steps 4 to 8 are repeated"
    assert repeated_work([_round(0), *steps, {"event": "phase_end"}], at) == "nothing is repeated"
