"""The run log: every event once and in order, despite disk errors and clock changes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import actors.run_log
from actors.line_file import LineFile
from actors.run_log import RunLog, append_event, read_events


def test_events_are_written_immediately_and_seen_once_by_followers(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("phase", phase="sft", num_steps=3)
    log.append("sft", phase="sft", step=1, loss=2.5, lr=0.1)
    assert [event["event"] for event in read_events(tmp_path)] == ["phase", "sft"]
    assert log.events_since(1) == read_events(tmp_path)[1:]
    log.close()


def test_events_after_the_end_are_ignored(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    log.append("done", seconds=1)
    log.close()
    # One of these may reuse the file descriptor of the log.
    others = [(tmp_path / str(number)).open("w+b") for number in range(9)]
    log.append("failure", what="too late", attempt=1)
    for other in others:
        other.close()
    assert {path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == {b""}
    assert [event["event"] for event in read_events(tmp_path / "run")] == ["done"]


def test_resume_state_is_written_before_the_rounds_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink().name))
    log = RunLog(tmp_path)
    log.add("round", round=0)
    log.add_solve_rates("{}")
    log.add_samples([{"text": "only to be looked at"}])
    log.write_out()
    assert synced == ["solve_rates.jsonl", "metrics.jsonl"]
    log.close()


def test_a_resumed_run_appends_to_its_files_with_the_same_clock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "phase", "time_s": 100.0}) + "\n")
    log = RunLog(tmp_path)
    assert 100 <= log.append("done", seconds=1)["time_s"] < 110
    assert len(read_events(tmp_path)) == 2
    log.close()


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "phase", "time_s": 1}\n{"event": "rou')
    assert read_events(tmp_path) == [{"event": "phase", "time_s": 1}]


def test_events_after_a_truncated_line_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "phase", "time_s": 1}\n{"event": "rou')
    log = RunLog(tmp_path)
    log.append("done", seconds=2)
    log.close()
    assert [event["event"] for event in read_events(tmp_path)] == ["phase", "done"]


def test_metrics_are_written_to_tensorboard(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(
        "round",
        round=3,
        reward=0.25,
        reward_parts={"cells": 0.5},
        reward_costs={"polite/num_requests": 9.0},
        num_ungraded={"timeout": 2, "error": 0},
        policy_version=4,
    )
    log.append("evaluation", label="round", round=4, num_correct=1, num_ungraded=5)
    log.append("sft", phase="sft", step=2, loss=3.0)
    log.append("sft_eval", phase="sft", step=2, loss=2.0, loss_at_t=[1.0, 3.0])
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("round/reward")] == [(3, 0.25)]
    assert [(e.step, e.value) for e in board.Scalars("reward/cells")] == [(3, 0.5)]
    assert [(e.step, e.value) for e in board.Scalars("reward_costs/polite/num_requests")] == [(3, 9.0)]
    assert [(e.step, e.value) for e in board.Scalars("num_ungraded/timeout")] == [(3, 2.0)]
    assert [(e.step, e.value) for e in board.Scalars("round/num_ungraded")] == [(4, 5.0)]
    assert [(e.step, e.value) for e in board.Scalars("sft/loss")] == [(2, 3.0)]
    assert [(e.step, e.value) for e in board.Scalars("sft_eval/loss")] == [(2, 2.0)]


def test_an_evaluation_metric_may_share_a_name_with_round_metrics(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("evaluation", label="sft", round=0, num_correct=1, num_ungraded=2)
    log.append("round", round=0, reward=0.5, num_ungraded={"timeout": 1, "error": 1})
    log.close()
    assert [event["num_ungraded"] for event in read_events(tmp_path)] == [2, {"timeout": 1, "error": 1}]


def test_metrics_are_sent_to_wandb_when_a_project_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    run = SimpleNamespace(log=told.append, finish=lambda: told.append("finished"))

    def init(**arguments: object) -> SimpleNamespace:
        told.append((arguments["project"], arguments["name"], arguments["resume"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = RunLog(tmp_path, "sudoku")
    log.append("sft", phase="sft", step=7, loss=1.5)
    log.close()
    assert told == [("sudoku", tmp_path.name, "allow"), {"sft/step": 7, "sft/loss": 1.5}, "finished"]


# It ends with a traceback when it cannot write.
TENSORBOARDS_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "d1-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs root, to mount a small disk")
    yield disk
    # TensorBoard's thread may not have printed its traceback yet.
    for thread in threading.enumerate():
        if getattr(thread, "exception", None) is not None:
            thread.join(60)
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(disk: Path) -> Path:
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@TENSORBOARDS_THREAD
def test_events_that_a_full_disk_refuses_are_written_later_in_order(small_disk: Path) -> None:
    log = RunLog(small_disk)
    # Events of more than a page, so that the disk can take a partial event.
    long = {"text": "x" * 3000, "reward": 0.5}
    log.append("round", round=0, **long)
    log.add_samples([{"round": 0, "completion": "y" * 3000}])
    filler = _fill(small_disk)
    for index in range(1, 8):
        log.append("round", round=index, **long)
        log.add_samples([{"round": index, "completion": "y" * 3000}])
    told = log.events_since(0)
    (failure,) = [event for event in told if event["event"] == "failure"]
    assert "the disk is full" in failure["what"]
    assert "wait in memory until there is room" in failure["what"]
    written = (small_disk / "metrics.jsonl").read_bytes()
    assert written.endswith(b"\n"), "no half line"
    assert [event["round"] for event in read_events(small_disk)][:1] == [0]
    assert len(read_events(small_disk)) < len(told)
    filler.unlink()
    log.append("round", round=8, **long)
    log.close()
    assert read_events(small_disk) == log.events_since(0)
    assert [event["round"] for event in read_events(small_disk) if event["event"] == "round"] == list(range(9))
    samples = [json.loads(line)["round"] for line in (small_disk / "samples.jsonl").read_text().splitlines()]
    assert samples == list(range(8))


@TENSORBOARDS_THREAD
def test_events_lost_at_the_end_are_reported(small_disk: Path) -> None:
    log = RunLog(small_disk)
    _fill(small_disk)
    log.append("round", round=0, text="x" * 100_000)
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_a_partially_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, data[: len(data) // 2])

    real_write = os.write
    file = LineFile(tmp_path / "lines")
    file.add("the first line")
    file.write_out()
    monkeypatch.setattr(os, "write", write_half)
    file.add("the second line")
    file.add("the third line")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.write_out()
        assert (tmp_path / "lines").read_text() == "the first line\n"
        assert file.num_waiting == 2
    monkeypatch.undo()
    file.close()
    assert (tmp_path / "lines").read_text() == "the first line\nthe second line\nthe third line\n"


def test_event_times_do_not_decrease_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path)
    before = log.append("phase", phase="sft", num_steps=3)["time_s"]
    monkeypatch.setattr(actors.run_log.time, "time", lambda: 0.0)
    after = log.append("phase", phase="rl", num_steps=3)["time_s"]
    log.close()
    assert before <= after < before + 60


def test_a_driver_can_append_to_a_dead_coordinators_log(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "phase", "time_s": 7.5}\n{"event": "rou')
    append_event(tmp_path, "failure", what="the coordinator died", attempt=1)
    first, last = read_events(tmp_path)
    assert first["time_s"] == 7.5
    assert (last["event"], last["what"], last["attempt"]) == ("failure", "the coordinator died", 1)
    assert 7.5 <= last["time_s"] < 67.5
