"""The run log: every event once and in order, despite disk errors and clock changes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import actors.run_log
from actors.files.line_file import LineFile
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


class _Fsyncs:
    """Counts fsyncs, and holds them back while `answers` is cleared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self.began, self.answers = 0, threading.Event(), threading.Event()
        self.answers.set()
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, _: int) -> None:
        self.num += 1
        self.began.set()
        assert self.answers.wait(60)


def test_what_is_recorded_during_a_write_shares_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsyncs, log = _Fsyncs(monkeypatch), RunLog(tmp_path)
    fsyncs.answers.clear()
    for index in range(100):
        log.note_failure(f"failure {index}")
        if not index:
            assert fsyncs.began.wait(60)
    assert log.events_since(0) == [], "a restarted process would not know them"
    assert log.backlog().num_waiting == 100
    fsyncs.answers.set()
    log.write_out()
    assert [event["what"] for event in read_events(tmp_path)] == [f"failure {index}" for index in range(100)]
    assert log.events_since(98) == read_events(tmp_path)[98:]
    assert fsyncs.num <= 3
    log.close()


def test_a_round_recorded_during_a_write_is_not_written_before_its_solve_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write, log = os.write, RunLog(tmp_path)

    def record_meanwhile(file: int, data: bytes) -> int:
        if not written:
            log.add_solve_rates("the rates of round 0")
            log.add("round", round=0)
        written.append(data.decode())
        return write(file, data)

    log.add_samples([{"completion": "of an earlier round"}])
    log.add("phase", phase="rl")
    monkeypatch.setattr(os, "write", record_meanwhile)
    log.write_out()
    assert [json.loads(line)["event"] for line in written[1:]] == ["phase"]
    log.write_out()
    assert [line[:20] for line in written[2:]] == ["the rates of round 0", '{"event": "round", "']
    log.close()


def test_a_failed_write_is_recorded_once_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = RunLog(tmp_path)
    monkeypatch.setattr(os, "fsync", broken)
    for index in range(3):
        log.append("phase", phase="sft", num_steps=index)
    assert read_events(tmp_path) == []
    assert [event["event"] for event in log.events_since(0)] == ["phase", "failure", "phase", "phase"]
    assert log.backlog().num_failed == 3
    monkeypatch.undo()
    log.write_out()
    assert read_events(tmp_path) == log.events_since(0)
    log.close()


def test_a_slow_write_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.run_log._SLOW_S", 0.01)
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.02))
    log = RunLog(tmp_path)
    for index in range(3):
        log.append("phase", phase="sft", num_steps=index)
    log.close()
    (failure,) = [event for event in read_events(tmp_path) if event["event"] == "failure"]
    assert failure["what"].startswith("the disk of the run directory is slow: a write took 0.")
    assert failure["attempt"] == 0, "nothing failed"


def test_failures_beyond_a_full_queue_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.run_log._MOST_WAITING", 3)
    fsyncs, log = _Fsyncs(monkeypatch), RunLog(tmp_path)
    fsyncs.answers.clear()
    for index in range(9):
        log.note_failure(f"failure {index}")
    assert log.backlog().num_waiting == 3
    log.add("round", round=0)
    fsyncs.answers.set()
    log.close()
    said = [event.get("what", "a round") for event in read_events(tmp_path)]
    assert said[:4] == ["failure 0", "failure 1", "failure 2", "a round"]
    assert said[4] == "6 more failures were not recorded, as 3 events waited for the disk"


def test_replaced_files_and_views_are_written_with_their_newest_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsyncs, log = _Fsyncs(monkeypatch), RunLog(tmp_path)
    fsyncs.answers.clear()
    log.note_failure("holds the thread")
    assert fsyncs.began.wait(60)
    shown: list[int] = []
    for index in range(5):
        log.replace(tmp_path / "session", str(index))
        log.show("status", partial(shown.append, index))
    assert not (tmp_path / "session").exists()
    fsyncs.answers.set()
    log.close()
    assert ((tmp_path / "session").read_text(), shown) == ("4", [4])


def test_followers_far_behind_read_old_events_from_the_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for index in range(999):
        log.add("round", round=index)
    log.write_out()
    # Events stay in memory while they wait for the disk; the next one finds that they do not any more.
    log.add("round", round=999)
    log.write_out()
    assert len(log._newest) < 300
    for count in (0, 1, 700, 743, 744, 745, 998, 1000, 1001):
        assert [event["round"] for event in log.events_since(count)] == list(range(count, 1000))
    log.close()


def test_a_long_truncated_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for whole in (b"", b"one\n", b"one\ntwo\n"):
        for rest in (b"", b"x", b"y" * 200_000):
            path.write_bytes(whole + rest)
            file = LineFile(path)
            file.add("next")
            file.close()
            assert path.read_bytes() == whole + b"next\n"
