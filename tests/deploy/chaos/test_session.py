"""What `d1 chaos` refuses before it starts anything, and what it reports."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.chaos import session
from deploy.chaos.driver import OutputLine
from deploy.chaos.expectations import ALLOWED, FaultOutcome
from deploy.chaos.faults import Fault, Harm, Moment, Setting, Target
from deploy.chaos.record import Blow, Drive, History, RunRecord
from deploy.chaos.report import as_json, markdown, rows
from deploy.chaos.session import ChaosVerdict, Order, carry_out
from deploy.errors import UserError

RECIPE = Path(__file__).parents[3] / "recipes" / "chaos.yaml"


def _order(tmp_path: Path, *overrides: str, reference: Path | None = None) -> Order:
    return Order(
        recipe_path=RECIPE,
        overrides=overrides,
        kills=1,
        seed=0,
        targets=tuple(Target),
        reference=reference,
        patience_s=1.0,
        out=tmp_path / "out",
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("control.num_steps=0", "control.num_steps 0 gives the control the rounds' seconds"),
        ("checkpoint_every_rounds=0", "checkpoint_every_rounds is 0, and faults between rounds aim at checkpoints"),
        ("sft.num_steps=0", "sft.num_steps is 0, and faults aim at every stage"),
    ],
)
def test_a_recipe_whose_runs_cannot_be_compared_is_refused(tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        carry_out(_order(tmp_path, override), print)
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_recipe_is_no_reference(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "recipe.yaml").write_text(RECIPE.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="is a run of another recipe"):
        carry_out(_order(tmp_path, reference=reference), print)
    (reference / "recipe.yaml").write_text(RECIPE.read_text())
    with pytest.raises(UserError, match="has not ended"):
        carry_out(_order(tmp_path, reference=reference), print)
    with pytest.raises(UserError, match="cannot read the recipe"):
        carry_out(_order(tmp_path, reference=tmp_path / "nowhere"), print)
    assert not (tmp_path / "out").exists(), "the same command with another reference goes on"


def test_a_place_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    with pytest.raises(UserError, match=f"^cannot make {out}: not a directory; give --out another one$"):
        carry_out(replace(_order(tmp_path), out=out), print)


def test_every_target_has_an_expectation() -> None:
    assert ALLOWED.keys() == set(Target)
    assert not [target for target, outcomes in ALLOWED.items() if FaultOutcome.STUCK in outcomes]


def test_what_was_done_before_ctrl_c_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(events=(), samples=(), digests={}, num_unreadable=0)

    class Run:
        def __init__(self, name: str, setting: Setting, *_: object) -> None:
            self.name, self.setting = name, setting

        def go(self, faults: deque[Fault]) -> RunRecord:
            if self.name == "disturbed-2":
                raise KeyboardInterrupt
            blow = replace(_blow(0, FaultOutcome.WENT_ON, 1.0), fault=faults.popleft())
            return RunRecord(name=self.name, setting=self.setting, drives=(), blows=(blow,), history=history)

    monkeypatch.setattr(session, "DisturbedRun", Run)
    monkeypatch.setattr(session, "_made_reference", lambda *_: history)
    monkeypatch.setattr(session, "judge", lambda *_: [])
    verdict = carry_out(replace(_order(tmp_path), kills=3, targets=(Target.SAMPLER,)), print)
    assert [len(record.blows) for record in verdict.records] == [1]
    assert len(verdict.skipped) == 2
    assert all(what.endswith(": the session was stopped") for what in verdict.skipped)


def _blow(number: int, outcome: FaultOutcome, seconds: float | None) -> Blow:
    fault = Fault(
        number=number,
        target=Target.LEARNER,
        harm=Harm.KILL,
        moment=Moment.ANY,
        delay_s=0.0,
        choice=0.0,
        seconds=None,
    )
    return Blow(
        fault=fault, victim="process 7", round=3, at_s=1.0, over_at_s=1.0, back_after_s=seconds, outcome=outcome
    )


def test_the_table_counts_faults_of_a_kind_and_their_seconds() -> None:
    blows = (
        _blow(1, FaultOutcome.WENT_ON, 2.0),
        _blow(2, FaultOutcome.WENT_ON, 4.0),
        _blow(3, FaultOutcome.RESUMED, 30.0),
        _blow(4, FaultOutcome.STUCK, None),
    )
    drive = Drive(
        began_s=0.0, ended_s=9.0, status=0, was_helped=False, lines=(OutputLine(at_s=1.0, text="x"),), leftovers=()
    )
    history = History(events=(), samples=(), digests={}, num_unreadable=0)
    record = RunRecord(name="one", setting=Setting.OWN_RAY, drives=(drive,), blows=blows, history=history)
    verdict = ChaosVerdict(records=(record,), skipped=(), violations=("one: this",))
    (row,) = rows(verdict)
    assert (row.times, row.went_on, row.resumed, row.stuck, row.median_s, row.max_s) == (4, 2, 1, 1, 4.0, 30.0)
    assert markdown(verdict).splitlines()[2] == "| learner | SIGKILL | any | 4 | 2 | 1 | 1 | 4.0 | 30.0 |"
    found = as_json(verdict)
    assert found["violations"] == ["one: this"]
    assert (
        found["faults"][2] | {"run": "one", "target": "learner", "outcome": "resumed", "back_after_s": 30.0}
        == (found["faults"][2])
    )
