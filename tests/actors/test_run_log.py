from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from actors.run_log import RunLog, read_events


def test_events_are_on_disk_at_once_and_followers_see_each_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("phase", phase="sft", num_steps=3)
    log.append("sft", phase="sft", step=1, loss=2.5, lr=0.1)
    assert [event["event"] for event in read_events(tmp_path)] == ["phase", "sft"]
    assert log.events_since(1) == read_events(tmp_path)[1:]
    log.close()


def test_a_resumed_run_goes_on_in_the_same_files_and_on_the_same_clock(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "phase", "time_s": 100.0}) + "\n")
    log = RunLog(tmp_path)
    assert 100 <= log.append("done", seconds=1)["time_s"] < 110
    assert len(read_events(tmp_path)) == 2
    log.close()


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "phase", "time_s": 1}\n{"event": "rou')
    assert read_events(tmp_path) == [{"event": "phase", "time_s": 1}]


def test_what_is_written_after_a_cut_line_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "phase", "time_s": 1}\n{"event": "rou')
    log = RunLog(tmp_path)
    log.append("done", seconds=2)
    log.close()
    assert [event["event"] for event in read_events(tmp_path)] == ["phase", "done"]


def test_numbers_go_to_tensorboard(tmp_path: Path) -> None:
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


def test_a_number_of_an_evaluation_may_have_the_name_of_several_of_a_round(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("evaluation", label="sft", round=0, num_correct=1, num_ungraded=2)
    log.append("round", round=0, reward=0.5, num_ungraded={"timeout": 1, "error": 1})
    log.close()
    assert [event["num_ungraded"] for event in read_events(tmp_path)] == [2, {"timeout": 1, "error": 1}]


def test_numbers_go_to_weights_and_biases_if_a_project_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
