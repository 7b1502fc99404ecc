"""The judge finds what it must, in records that were made by hand, and nothing in an honest one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.chaos.driver import OutputLine
from deploy.chaos.expectations import FaultOutcome
from deploy.chaos.faults import Fault, Harm, Moment, Setting, Target
from deploy.chaos.judge import JudgedRecipe, judge
from deploy.chaos.record import Blow, Drive, History, RunRecord, read_history

TERMS = JudgedRecipe(
    num_rounds=4, groups_per_round=8, group_size=4, max_staleness=0, phases=("sft", "rl-000004", "control")
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
# As far as round 2, then back to the checkpoint of two rounds.
HONEST = (*EVENTS[:5], *RESTART, *EVENTS[4:])


def _lines(*times_s: float) -> tuple[OutputLine, ...]:
    return (*(OutputLine(at_s=at_s, text=f"round at {at_s:g}") for at_s in times_s), LAST)


def _drive(**changes: Any) -> Drive:
    drive = Drive(
        began_s=0.0,
        ended_s=100.0,
        status=0,
        was_helped=False,
        lines=_lines(20.0, 45.0, 70.0),
        leftovers=(),
    )
    return replace(drive, **changes)


def _blow(target: Target, harm: Harm = Harm.KILL, outcome: FaultOutcome = FaultOutcome.WENT_ON, **changes: Any) -> Blow:
    fault = Fault(
        number=1,
        target=target,
        harm=harm,
        moment=Moment.ANY,
        delay_s=0.0,
        choice=0.0,
        seconds=changes.pop("seconds", None),
    )
    blow = Blow(fault=fault, victim="process 7", round=2, at_s=50.0, over_at_s=50.0, back_after_s=3.0, outcome=outcome)
    return replace(blow, **changes)


def _record(**changes: Any) -> RunRecord:
    record = RunRecord(
        name="one",
        setting=Setting.OWN_RAY,
        drives=(_drive(),),
        blows=(_blow(Target.LEARNER),),
        history=replace(REFERENCE, events=HONEST),
    )
    return replace(record, **changes)


def _with_events(*events: dict[str, Any]) -> RunRecord:
    return _record(history=replace(REFERENCE, events=events))


def _instead(index: int, **changes: Any) -> RunRecord:
    """A run in which one round is otherwise."""
    return _with_events(
        *(
            _round(index, **changes) if event.get("round") == index and event["event"] == "round" else event
            for event in EVENTS
        )
    )


def test_an_honest_history_passes_though_it_went_back_to_a_checkpoint() -> None:
    assert judge(TERMS, REFERENCE, _record()) == []


def test_an_end_that_the_role_may_have_passes_when_it_says_how_to_resume() -> None:
    sentence = OutputLine(at_s=60.0, text="d1: the run failed: ...; --resume goes on from the newest checkpoint")
    first = _drive(ended_s=61.0, status=1, lines=(OutputLine(at_s=30.0, text="round"), sentence))
    record = _record(
        drives=(first, _drive(began_s=62.0, lines=(OutputLine(at_s=80.0, text="round"),))),
        blows=(_blow(Target.CONTROLLER, outcome=FaultOutcome.RESUMED),),
    )
    assert judge(TERMS, REFERENCE, record) == []


def test_a_run_may_end_late_of_a_process_that_was_told_to_and_finished_its_call_first() -> None:
    sentence = OutputLine(at_s=60.0, text="d1: the run failed: ...; --resume goes on from the newest checkpoint")
    first = _drive(ended_s=61.0, status=1, lines=(OutputLine(at_s=30.0, text="round"), sentence))
    drives = (first, _drive(began_s=62.0, lines=(OutputLine(at_s=80.0, text="round"),)))
    later = _blow(Target.SAMPLER, outcome=FaultOutcome.RESUMED, at_s=50.0)
    told = _blow(Target.CONTROLLER, Harm.TERM, at_s=40.0)
    assert judge(TERMS, REFERENCE, _record(drives=drives, blows=(told, later))) == []
    for other in (_blow(Target.CONTROLLER, Harm.STOP, at_s=40.0), _blow(Target.GRADER, Harm.TERM, at_s=40.0)):
        (found,) = judge(TERMS, REFERENCE, _record(drives=drives, blows=(other, later)))
        assert found.endswith("the run ended and had to be resumed")


def test_a_driver_that_was_stopped_owes_no_word_meanwhile() -> None:
    stop = _blow(Target.DRIVER, Harm.STOP, at_s=46.0, over_at_s=75.0, seconds=29.0)
    assert judge(TERMS, REFERENCE, _record(drives=(_drive(lines=_lines(20.0, 45.0)),), blows=(stop,))) == []


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (_with_events(*EVENTS[:4], *EVENTS[5:]), "rounds 2 are lost"),
        (_with_events(*EVENTS[:4], *EVENTS[5:]), "round 3 came after round 1: those between were not trained"),
        (_with_events(*EVENTS[:5], *EVENTS[4:]), "round 2 was trained twice"),
        (_with_events(*EVENTS[:-1]), "the run never ended"),
        (_instead(1, num_completions=28), "round 1 lost groups: 28 completions and 0 failed groups of 32"),
        (_instead(1, num_failed_groups=1), "round 1 trained groups twice: 32 completions and 1 failed groups"),
        (_instead(2, max_staleness=1.0), "round 2 mixed versions: up to 1 older"),
        (_instead(2, policy_version=9), "round 2 published version 9 after 3"),
        (_instead(3, reward=0.5), "round 3 differs in reward: reward is 0.5 and not 0.3"),
        (_instead(3, kl=0.5), "round 3 differs in kl: kl is 0.5 and not None"),
        (_with_events(*HONEST[:7], _round(2, reward=0.9), *HONEST[8:]), "round 2 differs in reward"),
        (
            _record(history=replace(REFERENCE, samples=({"round": 2, "policy_version": 2},))),
            "round 2 has a completion of version 2, not of 3",
        ),
        (
            _record(history=replace(REFERENCE, digests=DIGESTS | {"control": "x"})),
            "the weights of checkpoint control are not those of the undisturbed run",
        ),
        (
            _record(history=replace(REFERENCE, digests={"initial": "a", "sft": "b", "rl-000004": "d"})),
            "checkpoint control is missing",
        ),
        (_record(history=replace(REFERENCE, num_unreadable=3)), "metrics.jsonl has 3 lines that are no events"),
        (
            _record(drives=(_drive(lines=_lines(20.0, 60.0)),)),
            "40 s without a word after 'round at 20', SIGKILL learner",
        ),
        (_record(drives=(_drive(lines=_lines(31.0, 50.0, 70.0)),)), "31 s without a word after 'its start'"),
        (_record(drives=(_drive(ended_s=130.0),)), "35 s without a word after 'done in 95 s'"),
        (_record(drives=(_drive(leftovers=("ray::IDLE",)),)), "1 processes were left: ray::IDLE"),
        (
            _record(
                drives=(
                    _drive(lines=(*_lines(20.0, 45.0, 70.0), OutputLine(at_s=96.0, text="*** SIGTERM received ***"))),
                )
            ),
            "it printed '*** SIGTERM received ***'",
        ),
        (_record(drives=(_drive(status=1),), blows=()), "it ended with status 1 though nothing was done to it"),
        (_record(drives=(_drive(status=1),)), "after SIGKILL learner without saying how to resume: 'done in 95 s'"),
        (_record(drives=(_drive(status=-9, was_helped=True),)), "it made no progress and had to be killed"),
        (
            _record(blows=(_blow(Target.SAMPLER, outcome=FaultOutcome.RESUMED),)),
            "fault 1, SIGKILL sampler (process 7, round 2): the run ended and had to be resumed",
        ),
        (_record(blows=(_blow(Target.STORE, outcome=FaultOutcome.STUCK, back_after_s=None),)), "the run got stuck"),
        (_record(blows=(_blow(Target.BYTES, Harm.FLIP, victim="rl-000002"),)), "nobody said that checkpoint rl-000002"),
    ],
)
def test_what_must_not_be_is_found_and_said(record: RunRecord, sentence: str) -> None:
    found = judge(TERMS, REFERENCE, record)
    assert [what for what in found if what.startswith("one: ") and sentence in what], found


def test_with_staleness_numbers_may_differ_and_older_versions_are_right() -> None:
    terms = replace(TERMS, max_staleness=1)
    record = _instead(3, reward=0.5, max_staleness=1.0)
    older = replace(record.history, samples=({"round": 2, "policy_version": 2},), digests={})
    assert judge(terms, REFERENCE, replace(record, history=older)) == []


def test_a_sample_with_other_ends_of_a_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(
        '{"round": 0, "completion": "\u2028}"}\n{"round": 1, "comp', encoding="utf-8"
    )
    assert read_history(tmp_path).samples == ({"round": 0, "completion": "\u2028}"},)
