"""The checker reports every violation in hand-made records, and none in a correct one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.child_process import OutputLine
from tests.chaos.checker import CheckedRecipe, violations
from tests.chaos.faults import Fault, FaultKind, FaultOutcome, Platform, Target, Trigger
from tests.chaos.record import History, InjectedFault, Launch, RunRecord, read_history

RECIPE = CheckedRecipe(
    num_rounds=4, groups_per_round=8, group_size=4, max_staleness=0, checkpoints=("sft", "rl-000004", "control")
)
LAST = OutputLine(at_s=95.0, text="done in 95 s")


def _round(index: int, **changes: Any) -> dict[str, Any]:
    facts = {"num_completions": 32, "num_failed_groups": 0, "num_ungraded": {"timeout": 0, "error": 0}}
    lag = {"mean_staleness": 0.0, "max_staleness": 0.0}
    return {
        "event": "round",
        "time_s": 3.0 * index,
        "round": index,
        "policy_version": index + 2,
        "reward": index / 10,
        **facts,
        **lag,
        **changes,
    }


EVENTS = (
    {"event": "run", "time_s": 0.0, "name": "chaos"},
    {"event": "phase", "time_s": 1.0, "phase": "rl", "num_steps": 4},
    *(_round(index) for index in range(4)),
    {"event": "evaluation", "time_s": 14.0, "label": "rl", "round": 4, "policy_version": 5, "num_correct": 7},
    {"event": "done", "time_s": 15.0, "seconds": 15.0},
)
SAMPLES = tuple({"round": index, "policy_version": index + 1} for index in range(4))
DIGESTS = {"initial": "a", "sft": "b", "rl-000002": "c", "rl-000004": "d", "control": "e"}
REFERENCE = History(events=EVENTS, samples=SAMPLES, digests=DIGESTS, num_unreadable=0)
RESTART = (
    {"event": "failure", "time_s": 9.0, "what": "the learner group restarted from checkpoint rl-000002", "attempt": 1},
    {"event": "phase", "time_s": 9.5, "phase": "rl", "num_steps": 4},
)
# Up to round 2, then back to the checkpoint after two rounds.
CORRECT = (*EVENTS[:5], *RESTART, *EVENTS[4:])


def _lines(*times_s: float) -> tuple[OutputLine, ...]:
    return (*(OutputLine(at_s=at_s, text=f"round at {at_s:g}") for at_s in times_s), LAST)


def _launch(**changes: Any) -> Launch:
    launch = Launch(
        began_s=0.0,
        ended_s=100.0,
        status=0,
        was_stuck=False,
        lines=_lines(20.0, 45.0, 70.0),
        leftovers=(),
    )
    return replace(launch, **changes)


def _injected(
    target: Target,
    kind: FaultKind = FaultKind.KILL,
    outcome: FaultOutcome = FaultOutcome.CONTINUED,
    **changes: Any,
) -> InjectedFault:
    fault = Fault(
        number=1,
        target=target,
        kind=kind,
        trigger=Trigger.ANY,
        delay_s=0.0,
        choice=0.0,
        seconds=changes.pop("seconds", None),
    )
    injected = InjectedFault(
        fault=fault, victim="process 7", round=2, began_s=50.0, ended_s=50.0, recovery_s=3.0, outcome=outcome
    )
    return replace(injected, **changes)


def _record(**changes: Any) -> RunRecord:
    record = RunRecord(
        name="one",
        platform=Platform.OWN_RAY,
        launches=(_launch(),),
        injected=(_injected(Target.LEARNER),),
        history=replace(REFERENCE, events=CORRECT),
    )
    return replace(record, **changes)


def _with_events(*events: dict[str, Any]) -> RunRecord:
    return _record(history=replace(REFERENCE, events=events))


def _with_round(index: int, **changes: Any) -> RunRecord:
    """Return a run with other values in one round."""
    return _with_events(
        *(
            _round(index, **changes) if event.get("round") == index and event["event"] == "round" else event
            for event in EVENTS
        )
    )


def test_a_correct_run_may_return_to_a_checkpoint() -> None:
    assert violations(RECIPE, REFERENCE, _record()) == []


def test_a_controllers_loss_may_end_a_run_that_says_how_to_resume() -> None:
    sentence = OutputLine(at_s=60.0, text="d1: the run failed: ...; --resume goes on from the newest checkpoint")
    first = _launch(ended_s=61.0, status=1, lines=(OutputLine(at_s=30.0, text="round"), sentence))
    record = _record(
        launches=(first, _launch(began_s=62.0, lines=(OutputLine(at_s=80.0, text="round"),))),
        injected=(_injected(Target.CONTROLLER, outcome=FaultOutcome.RESUMED),),
    )
    assert violations(RECIPE, REFERENCE, record) == []


def test_a_sigterm_to_the_controller_may_end_the_run_after_the_next_fault() -> None:
    sentence = OutputLine(at_s=60.0, text="d1: the run failed: ...; --resume goes on from the newest checkpoint")
    first = _launch(ended_s=61.0, status=1, lines=(OutputLine(at_s=30.0, text="round"), sentence))
    launches = (first, _launch(began_s=62.0, lines=(OutputLine(at_s=80.0, text="round"),)))
    later = _injected(Target.SAMPLER, outcome=FaultOutcome.RESUMED, began_s=50.0)
    terminated = _injected(Target.CONTROLLER, FaultKind.TERM, began_s=40.0)
    assert violations(RECIPE, REFERENCE, _record(launches=launches, injected=(terminated, later))) == []
    for other in (
        _injected(Target.CONTROLLER, FaultKind.STOP, began_s=40.0),
        _injected(Target.GRADER, FaultKind.TERM, began_s=40.0),
    ):
        (found,) = violations(RECIPE, REFERENCE, _record(launches=launches, injected=(other, later)))
        assert found.endswith("the run ended and was resumed")


def test_a_stopped_driver_may_be_silent() -> None:
    stop = _injected(Target.DRIVER, FaultKind.STOP, began_s=46.0, ended_s=75.0, seconds=29.0)
    assert violations(RECIPE, REFERENCE, _record(launches=(_launch(lines=_lines(20.0, 45.0)),), injected=(stop,))) == []


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (_with_events(*EVENTS[:4], *EVENTS[5:]), "rounds 2 are lost"),
        (_with_events(*EVENTS[:4], *EVENTS[5:]), "round 3 follows round 1: those between were not trained"),
        (_with_events(*EVENTS[:5], *EVENTS[4:]), "round 2 was trained twice"),
        (_with_events(*EVENTS[:-1]), "the run is not complete"),
        (_with_round(1, num_completions=28), "round 1 lost groups: 28 completions and 0 failed groups of 32"),
        (_with_round(1, num_failed_groups=1), "round 1 trained groups twice: 32 completions and 1 failed groups"),
        (_with_round(2, max_staleness=1.0), "round 2 mixed versions: up to 1 older"),
        (_with_round(2, policy_version=9), "round 2 published version 9 after 3"),
        (_with_round(3, reward=0.5), "round 3 differs in reward: reward is 0.5 and not 0.3"),
        (_with_round(3, kl=0.5), "round 3 differs in kl: kl is 0.5 and not None"),
        (_with_events(*CORRECT[:7], _round(2, reward=0.9), *CORRECT[8:]), "round 2 differs in reward"),
        (
            _record(history=replace(REFERENCE, samples=({"round": 2, "policy_version": 2},))),
            "round 2 has a completion of version 2, not of 3",
        ),
        (
            _record(history=replace(REFERENCE, digests=DIGESTS | {"control": "x"})),
            "the weights of checkpoint control differ from the reference run's",
        ),
        (
            _record(history=replace(REFERENCE, digests={"initial": "a", "sft": "b", "rl-000004": "d"})),
            "checkpoint control is missing",
        ),
        (_record(history=replace(REFERENCE, num_unreadable=3)), "metrics.jsonl has 3 lines that are not events"),
        (
            _record(launches=(_launch(lines=_lines(20.0, 60.0)),)),
            "40 s without output after 'round at 20', SIGKILL learner",
        ),
        (_record(launches=(_launch(lines=_lines(31.0, 50.0, 70.0)),)), "31 s without output after 'its start'"),
        (_record(launches=(_launch(ended_s=130.0),)), "35 s without output after 'done in 95 s'"),
        (_record(launches=(_launch(leftovers=("ray::IDLE",)),)), "1 processes were left: ray::IDLE"),
        (
            _record(
                launches=(
                    _launch(lines=(*_lines(20.0, 45.0, 70.0), OutputLine(at_s=96.0, text="*** SIGTERM received ***"))),
                )
            ),
            "it printed '*** SIGTERM received ***'",
        ),
        (_record(launches=(_launch(status=1),), injected=()), "it ended with status 1 without a fault"),
        (_record(launches=(_launch(status=1),)), "after SIGKILL learner without saying how to resume: 'done in 95 s'"),
        (_record(launches=(_launch(status=-9, was_stuck=True),)), "it made no progress and was killed"),
        (
            _record(injected=(_injected(Target.SAMPLER, outcome=FaultOutcome.RESUMED),)),
            "fault 1, SIGKILL sampler (process 7, round 2): the run ended and was resumed",
        ),
        (
            _record(injected=(_injected(Target.STORE, outcome=FaultOutcome.STUCK, recovery_s=None),)),
            "the run got stuck",
        ),
        (
            _record(injected=(_injected(Target.BYTES, FaultKind.FLIP, victim="rl-000002"),)),
            "no event says that checkpoint rl-000002",
        ),
    ],
)
def test_a_violation_is_reported(record: RunRecord, sentence: str) -> None:
    found = violations(RECIPE, REFERENCE, record)
    assert [what for what in found if what.startswith("one: ") and sentence in what], found


def test_with_staleness_numbers_may_differ_and_older_versions_are_allowed() -> None:
    recipe = replace(RECIPE, max_staleness=1)
    record = _with_round(3, reward=0.5, max_staleness=1.0)
    older = replace(record.history, samples=({"round": 2, "policy_version": 2},), digests={})
    assert violations(recipe, REFERENCE, replace(record, history=older)) == []


def test_a_sample_may_contain_a_unicode_line_separator(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(
        '{"round": 0, "completion": "\u2028}"}\n{"round": 1, "comp', encoding="utf-8"
    )
    assert read_history(tmp_path).samples == ({"round": 0, "completion": "\u2028}"},)
