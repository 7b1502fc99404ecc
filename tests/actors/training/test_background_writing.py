"""Large checkpoints are written in the background: their content, and what happens when the run ends."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.checkpoints import writing
from actors.run_config import ModelSection
from actors.spec import Phase, RunSpec
from actors.training.training import TrainingRun
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.checkpoint import save_checkpoint
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.parallel.consensus import Ranks
from rollout.config import EvaluationConfig
from tests.actors.local_run import LocalRun, Pulse, facts
from tests.ranks import run_ranks

WAIT_S = 60.0
KINDS = ("learner", "model")


def _spec(spec: RunSpec, run_dir: Path, **changes: Any) -> RunSpec:
    """A run of three rounds with a checkpoint after each, in its own directory."""
    shutil.copytree(spec.initial_checkpoint, run_dir / "checkpoints" / "initial")
    learner = {"num_rounds": 3, "groups_per_round": 4, "group_size": 4, "inner_updates": 1, "lr": 1e-3}
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "phases": (Phase.RL,),
        "learner": LearnerConfig.model_validate({**learner, "estimator": {"name": "one_step"}}),
        "evaluation": EvaluationConfig(num_problems=4),
        "checkpoint_every_rounds": 1,
    }
    return spec.model_copy(update=values | changes)


def _run(spec: RunSpec, run: LocalRun | None = None, pulse: Pulse | None = None) -> LocalRun:
    run = run or LocalRun(spec)
    TrainingRun(spec, run, pulse or Pulse(), Ranks()).run()
    return run


def _files(spec: RunSpec, name: str) -> dict[str, bytes]:
    directory = spec.checkpoints_dir / name
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".safetensors"}


def _checkpoints(run: LocalRun) -> list[tuple[str, bool]]:
    """Return each checkpoint's name, and whether it was written in the background."""
    return [
        (event["path"].rpartition("/")[2], event.get("beside", False))
        for event in run.events
        if event["event"] == "checkpoint"
    ]


class SlowDisk:
    """Blocks writes until the test allows them, and fails the given ones."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.fails_at: list[str] = []
        self.begun: list[str] = []

    def save(self, directory: Path, *arguments: Any, **more: Any) -> None:
        self.begun.append(directory.name)
        if directory.name == "rl-000003":
            self.may_write.set()  # At the end of the stage nothing else would unblock it.
        assert self.may_write.wait(WAIT_S), "writing was never allowed"
        if directory.name in self.fails_at:
            self.fails_at.remove(directory.name)
            raise OSError("No space left on device")
        save_checkpoint(directory, *arguments, **more)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr("actors.checkpoints.writing.save_checkpoint", disk.save)
    monkeypatch.setattr("actors.checkpoints.writing._MIN_BACKGROUND_BYTES", 0)
    yield disk
    disk.may_write.set()


class SlowDiskRun(LocalRun):
    """Unblocks the disk after a round that began once the checkpoint had been gathered."""

    def __init__(self, spec: RunSpec, disk: SlowDisk) -> None:
        super().__init__(spec)
        self._disk = disk

    def published(self, round_index: int, *arguments: Any) -> None:
        super().published(round_index, *arguments)
        if round_index:
            # The writer's thread may not have started yet.
            while self._disk.begun[-1:] != [f"rl-00000{round_index}"]:
                time.sleep(0.001)
            assert f"rl-00000{round_index}" not in facts(self._spec), "the round was trained on meanwhile"
            self._disk.may_write.set()

    def record(self, event: str, values: Any) -> None:
        if event == "checkpoint":
            assert values["path"].rpartition("/")[2] in facts(self._spec), "it is recorded when it is whole"
            self._disk.may_write.clear()
        super().record(event, values)


@pytest.mark.parametrize("lora", [FULL_FINE_TUNING, LoraConfig(rank=4, alpha=8)])
def test_a_background_checkpoint_has_the_weights_of_when_it_was_gathered(
    spec: RunSpec, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, lora: LoraConfig
) -> None:
    plain, background = (
        _spec(spec, tmp_path / name, model=ModelSection(lora=lora)) for name in ("plain", "background")
    )
    with monkeypatch.context() as at_once:
        at_once.setattr("actors.checkpoints.writing._MIN_BACKGROUND_BYTES", 10**9)
        disk.may_write.set()
        expected = _run(plain)
    assert _checkpoints(expected) == [(name, False) for name in ("rl-000001", "rl-000002", "rl-000003")]
    disk.may_write.clear()
    run = _run(background, SlowDiskRun(background, disk))
    assert _checkpoints(run) == [("rl-000001", True), ("rl-000002", True), ("rl-000003", False)]
    assert run.published_digests == expected.published_digests
    for name in ("rl-000001", "rl-000002", "rl-000003"):
        assert _files(background, name) == _files(plain, name), name
    assert facts(background) == {
        name: _without_seconds(state, facts(background)[name]) for name, state in facts(plain).items()
    }


def _without_seconds(state: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Replace the elapsed seconds by the other's, since they differ between runs."""
    return state | {"rl_seconds": other["rl_seconds"]}


def test_a_stop_waits_for_a_checkpoint_that_is_being_written(spec: RunSpec, tmp_path: Path, disk: SlowDisk) -> None:
    run = _spec(spec, tmp_path / "run")
    threading.Timer(0.3, disk.may_write.set).start()
    stopped = _run(run, pulse=Pulse("round 0: training"))
    assert disk.begun == ["rl-000001"], "once"
    assert [event["event"] for event in stopped.events[-2:]] == ["checkpoint", "stopped"]
    assert "rl-000001" in facts(run)


def test_a_failed_background_checkpoint_is_reported_and_written_again_at_a_stop(
    spec: RunSpec, tmp_path: Path, disk: SlowDisk
) -> None:
    disk.fails_at, run = ["rl-000001"], _spec(spec, tmp_path / "run")
    disk.may_write.set()
    stopped = _run(run, pulse=Pulse("round 0: training"))
    assert disk.begun == ["rl-000001", "rl-000001"]
    assert [event for event in stopped.events if event["event"] == "failure"] == [
        {"event": "failure", "what": "checkpoint rl-000001: No space left on device", "attempt": 1}
    ]
    assert "rl-000001" in facts(run)


def test_the_wait_for_a_background_checkpoint_is_bounded_by_its_size(
    spec: RunSpec, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = (_spec(spec, tmp_path / name) for name in ("run", "whole"))
    said = r"^checkpoint rl-000001 was not written within 0 s; check its disk$"
    with monkeypatch.context() as patch:
        patch.setattr("actors.checkpoints.background_writer._WRITING_S", 0.2)
        with pytest.raises(TimeoutError, match=said):
            _run(run)
    assert list(facts(run)) == ["initial"], "what there was is what there is"
    monkeypatch.setattr("actors.checkpoints.writing.save_checkpoint", save_checkpoint)
    disk.fails_at = ["rl-000001"]
    disk.may_write.set()
    _run(run)
    _run(whole)
    assert _files(run, "rl-000003") == _files(whole, "rl-000003")


def test_a_round_that_fails_leaves_the_checkpoint_that_was_being_written(
    spec: RunSpec, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, update = _spec(spec, tmp_path / "run"), Learner.update

    def failing(learner: Learner, batch: Any, round_index: int) -> dict[str, float]:
        if round_index:
            threading.Timer(0.3, disk.may_write.set).start()
            raise RuntimeError("the device is lost")
        return update(learner, batch, round_index)

    monkeypatch.setattr(Learner, "update", failing)
    with pytest.raises(RuntimeError, match="the device is lost"):
        _run(run)
    assert list(facts(run)) == ["initial", "rl-000001"]


def _rank(rank: int, spec: RunSpec, fails_at: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec.run_dir}/port", rank=rank, world_size=2)
    # Set here, since each rank is a separate process.
    writing._MIN_BACKGROUND_BYTES = 0
    disk = SlowDisk()
    disk.may_write.set()
    disk.fails_at = [fails_at]
    update = Learner.update

    def learning(learner: Learner, batch: RolloutBatch, round_index: int) -> dict[str, float]:
        # The untrained policy is never right, and equal rewards have no gradient.
        return update(learner, replace(batch, rewards=torch.arange(batch.num_rows) % 2.0), round_index)

    Learner.update = learning  # type: ignore[method-assign]
    was_there = max(facts(spec))
    writing.save_checkpoint = disk.save  # type: ignore[assignment]
    run = LocalRun(spec)
    TrainingRun(spec, run, Pulse("round 0: training" if fails_at else ""), Ranks()).run()
    names = [name for name, is_beside in _checkpoints(run) if is_beside]
    due = [name for name in ("rl-000001", "rl-000002") if name > was_there]
    assert names == ([] if rank else ["rl-000001"] if fails_at else due)
    dist.destroy_process_group()


@pytest.mark.nightly
def test_ranks_write_shards_in_the_background_and_resume_from_them(spec: RunSpec, tmp_path: Path) -> None:
    whole, resumed, again = (_spec(spec, tmp_path / name) for name in ("whole", "resumed", "again"))
    run_ranks(_rank, whole, "", num=2)
    learner, model = ([f"{kind}.rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)] for kind in KINDS)
    assert sorted(_files(whole, "rl-000001")) == [*learner, *model]
    assert sorted(_files(whole, "rl-000003")) == [*learner, "model.safetensors"], (
        "the end of a stage is for other tools"
    )
    shutil.copytree(whole.checkpoints_dir / "rl-000001", resumed.checkpoints_dir / "rl-000001")
    run_ranks(_rank, resumed, "", num=2)
    for name in ("rl-000002", "rl-000003"):
        assert _files(resumed, name) == _files(whole, name), name
    run_ranks(_rank, again, "rl-000001", num=2)
    assert list(facts(again)) == ["initial", "rl-000001"], "written at the second try, by the stop"
