"""Faults in runs of a fake `d1 train`: the process hit, the record, resuming, and leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from benchmarks.processes.run_processes import MARK, Role, RunProcesses
from tests.chaos.checker import CheckedRecipe, violations
from tests.chaos.faults import Fault, FaultKind, FaultOutcome, Platform, Target, Trigger
from tests.chaos.faulty_run import ChaosPlan, FaultyRun, run_reference
from tests.chaos.record import History, RunRecord, read_history

FAKE = Path(__file__).with_name("fake_train.py")
NUM_ROUNDS = 100
RECIPE = CheckedRecipe(
    num_rounds=NUM_ROUNDS, groups_per_round=2, group_size=4, max_staleness=0, checkpoints=(f"rl-{NUM_ROUNDS:06d}",)
)


def _plan(flaw: str = "none", timeout_s: float = 60.0, num_rounds: int = NUM_ROUNDS) -> ChaosPlan:
    return ChaosPlan(
        command=(sys.executable, str(FAKE), flaw, str(num_rounds)),
        sizes={Role.SAMPLER: 2, Role.LEARNER: 2},
        checkpoint_every_rounds=5,
        progress_timeout_s=timeout_s,
        leftover_timeout_s=10.0,
        disk_bytes=16 << 20,
    )


def _fault(
    target: Target,
    kind: FaultKind = FaultKind.KILL,
    trigger: Trigger = Trigger.ANY,
    seconds: float | None = None,
    number: int = 1,
) -> Fault:
    return Fault(number=number, target=target, kind=kind, trigger=trigger, delay_s=0.1, choice=0.7, seconds=seconds)


def _faulty(tmp_path: Path, plan: ChaosPlan, *faults: Fault) -> tuple[RunRecord, list[str]]:
    logged: list[str] = []
    record = FaultyRun("one", Platform.OWN_RAY, tmp_path, plan, logged.append).run(deque(faults))
    return record, logged


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> History:
    directory = tmp_path_factory.mktemp("reference")
    run_reference("reference", directory, _plan())
    return read_history(directory / "reference")


def test_killed_and_stopped_workers_do_not_change_the_history(tmp_path: Path, reference: History) -> None:
    faults = (
        _fault(Target.SAMPLER),
        _fault(Target.LEARNER, trigger=Trigger.CHECKPOINT, number=2),
        _fault(Target.GRADER, FaultKind.STOP, number=3),
        _fault(Target.LEARNER, trigger=Trigger.PUBLISHED, number=4),
        _fault(Target.REGISTRY, FaultKind.TERM, number=5),
    )
    record, logged = _faulty(tmp_path, _plan(), *faults)
    assert [one.outcome for one in record.injected] == [FaultOutcome.CONTINUED] * 5
    assert [one.victim.split(",")[0] for one in record.injected[:2]] == ["ray::SamplerWorker", "ray::RayTrainWorker"]
    assert len(record.launches) == 1
    assert violations(RECIPE, reference, record) == []
    assert any(line.startswith("fault 2, SIGKILL learner mid-checkpoint: ray::RayTrainWorker") for line in logged)
    assert (tmp_path / "one" / "metrics.jsonl").is_file()
    assert "round 5" in (tmp_path / "one.log").read_text()


@pytest.mark.nightly
def test_a_run_that_ended_is_resumed(tmp_path: Path, reference: History) -> None:
    faults = (_fault(Target.CONTROLLER), _fault(Target.DRIVER, number=2))
    record, _ = _faulty(tmp_path, _plan(), *faults)
    assert [one.outcome for one in record.injected] == [FaultOutcome.RESUMED] * 2
    assert [one.status for one in record.launches] == [1, -9, 0]
    assert violations(RECIPE, reference, record) == []


def test_an_unreported_repetition_of_a_round_is_a_violation(tmp_path: Path, reference: History) -> None:
    record, _ = _faulty(tmp_path, _plan("double"), _fault(Target.LEARNER))
    (found,) = violations(RECIPE, reference, record)
    assert "was trained twice" in found


@pytest.mark.nightly
def test_a_leftover_process_is_a_violation_and_is_killed(tmp_path: Path, reference: History) -> None:
    record, _ = _faulty(tmp_path, _plan("orphan"), _fault(Target.SAMPLER))
    assert violations(RECIPE, reference, record) == ["one: `d1 train` number 1: 1 processes were left: sleep 1000"]


@pytest.mark.nightly
def test_a_stuck_run_is_killed_and_is_a_violation(tmp_path: Path, reference: History) -> None:
    record, _ = _faulty(tmp_path, _plan("hang", timeout_s=15.0), _fault(Target.COORDINATOR, FaultKind.STOP))
    assert [one.outcome for one in record.injected] == [FaultOutcome.STUCK]
    assert [one.was_stuck for one in record.launches] == [True, False]
    (found,) = violations(RECIPE, reference, record)
    assert "SIGSTOP coordinator for ever" in found
    assert found.endswith("the run got stuck and was killed")


def test_faults_that_do_not_fit_into_a_run_stay_in_the_queue(tmp_path: Path) -> None:
    faults = deque(_fault(Target.SAMPLER, number=number) for number in range(1, 40))
    record = FaultyRun("one", Platform.OWN_RAY, tmp_path, _plan(num_rounds=20), list[str]().append).run(faults)
    assert len(faults) + len(record.injected) == 39
    assert faults


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_only_the_runs_own_disk_is_filled(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail
    record, logged = _faulty(tmp_path, _plan(), _fault(Target.DISK, FaultKind.FILL, seconds=0.5))
    if any("skipped" in line for line in logged):
        pytest.skip(logged[-1])
    assert record.injected
    assert abs(os.statvfs(tmp_path).f_bavail - free) * os.statvfs(tmp_path).f_frsize < 1 << 30


def test_processes_of_another_run_are_not_found(tmp_path: Path) -> None:
    ours, other = RunProcesses("ours"), RunProcesses("other")
    script = 'exec -a "ray::SamplerWorker" sleep 60'
    processes = [subprocess.Popen(["bash", "-c", script], env=os.environ | {MARK: one.mark}) for one in (ours, other)]
    try:
        while not (ours.of_role(Role.SAMPLER) and other.of_role(Role.SAMPLER)):
            pass
        assert [process.pid for process in ours.of_role(Role.SAMPLER)] == [processes[0].pid]
        ours.kill()
        assert processes[0].wait(timeout=20) == -signal.SIGKILL
        assert [process.pid for process in other.living()] == [processes[1].pid]
    finally:
        for process in processes:
            process.kill()
            process.wait()
