"""Faults on processes that stand in for a run's: who is hit, what is noted, who resumes, what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from deploy.chaos.expectations import FaultOutcome
from deploy.chaos.faults import Fault, Harm, Moment, Setting, Target
from deploy.chaos.judge import JudgedRecipe, judge
from deploy.chaos.record import History, RunRecord, read_history
from deploy.chaos.run import ChaosPlan, DisturbedRun, undisturbed
from deploy.chaos.targets import MARK, Family

FAKE = Path(__file__).with_name("fake_train.py")
NUM_ROUNDS = 100
TERMS = JudgedRecipe(
    num_rounds=NUM_ROUNDS, groups_per_round=2, group_size=4, max_staleness=0, phases=(f"rl-{NUM_ROUNDS:06d}",)
)


def _plan(flaw: str = "none", patience_s: float = 60.0, num_rounds: int = NUM_ROUNDS) -> ChaosPlan:
    return ChaosPlan(
        command=(sys.executable, str(FAKE), flaw, str(num_rounds)),
        sizes={Target.SAMPLER: 2, Target.LEARNER: 2},
        checkpoint_every_rounds=5,
        patience_s=patience_s,
        leftover_s=10.0,
        disk_bytes=16 << 20,
    )


def _fault(
    target: Target, harm: Harm = Harm.KILL, moment: Moment = Moment.ANY, seconds: float | None = None, number: int = 1
) -> Fault:
    return Fault(number=number, target=target, harm=harm, moment=moment, delay_s=0.1, choice=0.7, seconds=seconds)


def _disturbed(tmp_path: Path, plan: ChaosPlan, *faults: Fault) -> tuple[RunRecord, list[str]]:
    said: list[str] = []
    record = DisturbedRun("one", Setting.OWN_RAY, tmp_path, plan, said.append).go(deque(faults))
    return record, said


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> History:
    directory = tmp_path_factory.mktemp("reference")
    undisturbed("reference", directory, _plan())
    return read_history(directory / "reference")


def test_a_worker_is_replaced_and_the_history_is_the_undisturbed_one(tmp_path: Path, reference: History) -> None:
    faults = (
        _fault(Target.SAMPLER),
        _fault(Target.LEARNER, moment=Moment.CHECKPOINT, number=2),
        _fault(Target.GRADER, Harm.STOP, number=3),
        _fault(Target.LEARNER, moment=Moment.PUBLISHED, number=4),
        _fault(Target.REGISTRY, Harm.TERM, number=5),
    )
    record, said = _disturbed(tmp_path, _plan(), *faults)
    assert [blow.outcome for blow in record.blows] == [FaultOutcome.WENT_ON] * 5
    assert [blow.victim.split(",")[0] for blow in record.blows[:2]] == ["ray::SamplerWorker", "ray::RayTrainWorker"]
    assert len(record.drives) == 1
    assert judge(TERMS, reference, record) == []
    assert any(line.startswith("fault 2, SIGKILL learner mid-checkpoint: ray::RayTrainWorker") for line in said)
    assert (tmp_path / "one" / "metrics.jsonl").is_file()
    assert "round 5" in (tmp_path / "one.log").read_text()


@pytest.mark.nightly
def test_a_run_that_ended_is_resumed_as_a_user_would(tmp_path: Path, reference: History) -> None:
    faults = (_fault(Target.CONTROLLER), _fault(Target.DRIVER, number=2))
    record, _ = _disturbed(tmp_path, _plan(), *faults)
    assert [blow.outcome for blow in record.blows] == [FaultOutcome.RESUMED] * 2
    assert [drive.status for drive in record.drives] == [1, -9, 0]
    assert judge(TERMS, reference, record) == []


def test_a_round_that_comes_again_unannounced_is_found(tmp_path: Path, reference: History) -> None:
    record, _ = _disturbed(tmp_path, _plan("double"), _fault(Target.LEARNER))
    (found,) = judge(TERMS, reference, record)
    assert "was trained twice" in found


@pytest.mark.nightly
def test_a_process_that_outlives_its_run_is_found_and_ended(tmp_path: Path, reference: History) -> None:
    record, _ = _disturbed(tmp_path, _plan("orphan"), _fault(Target.SAMPLER))
    assert judge(TERMS, reference, record) == ["one: `d1 train` number 1: 1 processes were left: sleep 1000"]


@pytest.mark.nightly
def test_a_run_that_waits_for_ever_is_helped_and_that_is_a_violation(tmp_path: Path, reference: History) -> None:
    record, _ = _disturbed(tmp_path, _plan("hang", patience_s=15.0), _fault(Target.COORDINATOR, Harm.STOP))
    assert [blow.outcome for blow in record.blows] == [FaultOutcome.STUCK]
    assert [drive.was_helped for drive in record.drives] == [True, False]
    (found,) = judge(TERMS, reference, record)
    assert "SIGSTOP coordinator for ever" in found
    assert found.endswith("the run got stuck and had to be killed")


def test_faults_that_a_run_is_too_short_for_are_left_for_the_next(tmp_path: Path) -> None:
    faults = deque(_fault(Target.SAMPLER, number=number) for number in range(1, 40))
    record = DisturbedRun("one", Setting.OWN_RAY, tmp_path, _plan(num_rounds=20), [].append).go(faults)
    assert len(faults) + len(record.blows) == 39
    assert faults


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_full_disk_is_the_runs_own_and_is_emptied_again(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail
    record, said = _disturbed(tmp_path, _plan(), _fault(Target.DISK, Harm.FILL, seconds=0.5))
    if any("skipped" in line for line in said):
        pytest.skip(said[-1])
    assert record.blows
    assert abs(os.statvfs(tmp_path).f_bavail - free) * os.statvfs(tmp_path).f_frsize < 1 << 30


def test_processes_of_another_run_are_not_seen(tmp_path: Path) -> None:
    ours, other = Family("ours"), Family("other")
    script = 'exec -a "ray::SamplerWorker" sleep 60'
    processes = [
        subprocess.Popen(["bash", "-c", script], env=os.environ | {MARK: family.mark}) for family in (ours, other)
    ]
    try:
        while not (ours.of_role(Target.SAMPLER) and other.of_role(Target.SAMPLER)):
            pass
        assert [process.pid for process in ours.of_role(Target.SAMPLER)] == [processes[0].pid]
        ours.kill()
        assert processes[0].wait(timeout=20) == -signal.SIGKILL
        assert [process.pid for process in other.living()] == [processes[1].pid]
    finally:
        for process in processes:
            process.kill()
            process.wait()
