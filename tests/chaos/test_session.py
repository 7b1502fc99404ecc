"""Sessions: Ctrl-C, the report, and a whole one on Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from tests.chaos import session
from tests.chaos.faults import Fault, FaultKind, FaultOutcome, Platform, Target, Trigger
from tests.chaos.record import History, InjectedFault, RunRecord
from tests.chaos.report import as_json, markdown
from tests.chaos.session import SessionOptions, SessionResult, run_session

ROOT = Path(__file__).parents[2]
HISTORY = History(events=(), samples=(), digests={}, num_unreadable=0)


def _injected(fault: Fault, outcome: FaultOutcome, recovery_s: float | None) -> InjectedFault:
    return InjectedFault(
        fault=fault,
        victim="process 7",
        round=3,
        began_s=1.0,
        ended_s=1.0,
        recovery_s=recovery_s,
        outcome=outcome,
    )


def _record(*injected: InjectedFault, name: str = "one") -> RunRecord:
    return RunRecord(name=name, platform=Platform.OWN_RAY, launches=(), injected=injected, history=HISTORY)


def test_ctrl_c_keeps_the_completed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self, name: str, *_: object) -> None:
            self.name = name

        def run(self, faults: deque[Fault]) -> RunRecord:
            if self.name == "faulty-2":
                raise KeyboardInterrupt
            return _record(_injected(faults.popleft(), FaultOutcome.CONTINUED, 1.0), name=self.name)

    monkeypatch.setattr(session, "FaultyRun", Run)
    monkeypatch.setattr(session, "run_reference", lambda *_: 1.0)
    monkeypatch.setattr(session, "violations", lambda *_: [])
    options = SessionOptions(
        overrides=(), num_faults=3, seed=0, targets=(Target.SAMPLER,), out=tmp_path / "runs" / "out"
    )
    result = run_session(options, print)
    assert [len(record.injected) for record in result.records] == [1]
    assert len(result.skipped) == 2
    assert all(what.endswith(": the session was stopped") for what in result.skipped)


def test_the_report_has_a_row_of_outcomes_and_seconds_for_each_kind_of_fault() -> None:
    fault = Fault(
        number=1,
        target=Target.LEARNER,
        kind=FaultKind.KILL,
        trigger=Trigger.ANY,
        delay_s=0.0,
        choice=0.0,
        seconds=None,
    )
    record = _record(
        _injected(fault, FaultOutcome.CONTINUED, 2.0),
        _injected(fault, FaultOutcome.CONTINUED, 4.0),
        _injected(fault, FaultOutcome.RESUMED, 30.0),
        _injected(fault, FaultOutcome.STUCK, None),
    )
    assert markdown([record]).splitlines()[2] == "| learner | SIGKILL | any | 4 | 2 | 1 | 1 | 4.0 | 30.0 |"
    found = as_json(7, SessionResult(records=(record,), skipped=(), violations=("one: this",)))
    assert (found["seed"], found["violations"]) == (7, ("one: this",))
    expected = {"run": "one", "target": "learner", "outcome": "resumed", "recovery_s": 30.0}
    assert found["faults"][2].items() >= expected.items()


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.parametrize("oversampling", [1, 2])
def test_killed_processes_and_scaled_pools_are_bit_identical(tmp_path: Path, oversampling: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    out = tmp_path / "session"
    command = [sys.executable, "-m", "tests.chaos", "learner.num_rounds=60", "evaluation.num_problems=20"]
    command += [f"rollout.max_oversampling={oversampling}", "--kills", "6", "--seed", "1", "--out", str(out)]
    command += [word for role in ("sampler", "grader", "learner", "pool") for word in ("--only", role)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((out / "report.json").read_text())
    assert {fault["target"] for fault in found["faults"]} == {"sampler", "grader", "learner", "pool"}, done.stdout
    assert len(found["faults"]) == 6
    # Silence only shows how busy this machine is.
    assert [what for what in found["violations"] if "without output" not in what] == [], done.stdout
    assert "| learner | SIGKILL |" in done.stdout
