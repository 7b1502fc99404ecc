"""Tests of the results table: plan, resumable execution, packed state and formatting."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.table import execute as executing
from benchmarks.table.__main__ import main
from benchmarks.table.cells import MISSING, Measured, Place, as_markdown, interval_of, read_cells
from benchmarks.table.marks import write_between_marks
from benchmarks.table.plan import Evaluation, Step, Training, plan, remaining, rows
from benchmarks.table.scales import RECIPES, SCALES, TRAJECTORY
from deploy.recipe.overrides import load_recipe
from learner.estimators import OneStepConfig, TrajectoryConfig
from rewards import Split, make_task
from rewards.score import Score

PARTS = Path(executing.__file__).parent / "parts.sh"
TINY = ("--scale", "tiny", "--tasks", "sudoku", "--methods", TRAJECTORY, "--seeds", "0")

# Fake d1: records its arguments and writes the outputs of d1's commands. Marker files make it fail or wait.
STAND_IN = """
import json, pathlib, signal, sys, time
here, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
with (here / "calls").open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == "eval":
    place = pathlib.Path(words[words.index("--out") + 1])
else:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    place = pathlib.Path(given["runs_dir"]) / given["name"]
place.mkdir(parents=True, exist_ok=True)
if (here / f"fails {place.name}").exists():
    sys.exit("d1: the disk is full")
if (here / f"waits {place.name}").exists():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (place / "kept").touch()
        sys.exit(130)
if words[0] == "eval":
    cell = {"num_problems": 12, "num_correct": 3, "worker_seconds": 4.0}
    (place / "results.json").write_text(json.dumps({"cells": [cell]}))
else:
    last = place / "checkpoints" / ("rl-000300" if words[0] == "train" else "sft")
    last.mkdir(parents=True)
    (last / "weights").write_bytes(bytes(1000))
    (place / "metrics.jsonl").write_text(json.dumps({"event": "done", "seconds": 2.0, "time_s": 2.0}) + "\\n")
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(executing, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(executing, "_WORTH_STARTING_S", 0.0)
    monkeypatch.setattr(executing, "_D1", (sys.executable, str(script), str(tmp_path)))
    path = tmp_path / "calls"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, run in this process. Returns its exit status."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["table", *TINY, "--out", str(tmp_path / "out"), *words])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return run


def _plan(name: str, *methods: str) -> list[Step]:
    scale = SCALES[name]
    return plan(scale, Path("/out"), tasks=list(scale.tasks), seeds=scale.seeds, methods=methods or list(scale.methods))


@pytest.mark.parametrize("name", list(SCALES))
def test_each_steps_inputs_are_made_before_it(name: str) -> None:
    made: set[str] = set()
    steps = _plan(name)
    for step in steps:
        assert step.needs in made or not step.needs.startswith("/out"), step.name
        if isinstance(step, Training):
            made.add(step.checkpoint)
    assert len({step.name for step in steps}) == len(steps)
    assert len({step.place for step in steps if isinstance(step, Evaluation)}) == sum(
        len(task.lengths) * len(SCALES[name].seeds) * len(rows(list(SCALES[name].methods)))
        for task in SCALES[name].tasks.values()
    )


def test_overrides_do_not_change_a_trainings_start() -> None:
    changes = ("model={d_model: 32, num_layers: 1}", "name=mine", "sft.num_steps=3")
    steps = plan(SCALES["tiny"], Path("/out"), tasks=["sudoku"], seeds=[0], methods=[TRAJECTORY], changes=changes)
    base, sft = (
        load_recipe(Path(step.words[1]), step.words[2:])
        for step in steps
        if isinstance(step, Training) and step.words[0] == "sft"
    )
    assert (sft.model.d_model, base.sft.num_steps, sft.sft.num_steps) == (32, 3, 3)
    assert str(sft.model.checkpoint) == "/out/runs/sudoku.0.base/checkpoints/sft"
    assert (base.name, sft.name) == ("sudoku.0.base", "sudoku.0.sft")
    assert base.canvas_tokens == 18 + 36, "its context holds the longest completion that is evaluated"


def test_the_8b_scale_has_one_sft_for_all_tasks() -> None:
    assert sum(isinstance(step, Training) and step.words[0] == "sft" for step in _plan("8b")) == 1


def test_a_method_is_trained_by_its_own_estimator() -> None:
    estimators = {
        step.name: load_recipe(Path(step.words[3]), step.words[4:]).learner.estimator
        for step in _plan("smollm2")
        if isinstance(step, Training) and step.words[0] == "train"
    }
    assert isinstance(estimators["countdown.42.diffu-grpo"], OneStepConfig)
    exact = estimators["countdown.42.sft.trajectory"]
    assert isinstance(exact, TrajectoryConfig)
    assert (exact.steps_per_segment, exact.law) == (1, "sampler")


@pytest.mark.parametrize("task", list(SCALES["smollm2"].tasks))
def test_smollm2_recipes_name_the_other_method_in_a_comment(task: str) -> None:
    text = (RECIPES / f"smollm2-{task}.yaml").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("# By the exact likelihood")]
    assert tuple(shlex.split(line.partition(": ")[2].removesuffix("."))) == SCALES["smollm2"].methods[TRAJECTORY]


@pytest.mark.parametrize("name", ["smollm2-countdown", "smollm2-countdown-cpu", "smollm2-sudoku"])
def test_smollm2_recipes_have_enough_problems(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml", ["num_train_problems=390", "sft.num_labels=10"])
    task = make_task(recipe.task)
    assert len(task.problems(Split.TRAIN, 390, 0)) == 390
    assert len(task.problems(Split.HELDOUT, recipe.evaluation.num_problems, 0)) == recipe.evaluation.num_problems


def test_every_command_runs_once_and_every_cell_is_kept(
    table: Callable[..., int], calls: Callable[[], list[list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table() == 0
    given = calls()
    kinds = [words[0] for words in given]
    assert kinds == ["sft", *["eval"] * 3] * 2 + ["train", *["eval"] * 3] * 2
    cells = read_cells(tmp_path / "out" / "cells.jsonl")
    assert len(cells) == 12
    assert {cell.place.row: cell.training_s for cell in cells} == {
        "base": 0,
        "+ SFT": 2,
        "+ trajectory": 2,
        "+ SFT + trajectory": 4,
    }
    assert "| base | 25.0 (8.9 to 53.2) | 25.0 (8.9 to 53.2) | 25.0 (8.9 to 53.2) | 0 | 0 | 12 |" in (
        capsys.readouterr().out
    )
    assert table() == 0
    assert calls() == given, "nothing is done twice"
    assert (tmp_path / "out" / "state.txt").read_text() == "cells.jsonl\nstate.txt\n", "no run is needed"


def test_it_stops_at_its_limit_and_resumes_from_packed_parts(
    table: Callable[..., int], calls: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    """Stops in the last training run, RL from SFT, which needs only the SFT checkpoint."""
    name, out = "sudoku.0.sft.trajectory", tmp_path / "out"
    (tmp_path / f"fails {name}").touch()
    assert table() == 1
    (tmp_path / f"fails {name}").rename(tmp_path / f"waits {name}")
    assert table("--minutes", "0.02") == 0
    state = (out / "state.txt").read_text().splitlines()
    assert state == ["runs/sudoku.0.sft", "runs/sudoku.0.sft.trajectory", "cells.jsonl", "state.txt"]
    assert (out / "runs" / "sudoku.0.sft.trajectory" / "kept").exists()
    subprocess.run([PARTS, "pack", out, tmp_path / "parts"], check=True)
    out.rename(tmp_path / "gone")
    subprocess.run([PARTS, "unpack", tmp_path / "parts", out], check=True)
    (tmp_path / f"waits {name}").unlink()
    before = len(calls())
    assert table() == 0
    again = calls()[before:]
    assert [words[0] for words in again] == ["train", "eval", "eval", "eval"]
    assert again[0][-1] == "--resume"
    assert len(read_cells(out / "cells.jsonl")) == 12


def test_parts_are_small_and_refused_if_damaged(tmp_path: Path) -> None:
    out, parts, again = tmp_path / "out", tmp_path / "parts", tmp_path / "again"
    (out / "runs").mkdir(parents=True)
    (out / "state.txt").write_text("runs\nstate.txt\n")
    (out / "runs" / "weights").write_bytes(os.urandom(70_000))
    os.utime(out / "runs" / "weights", ns=(10**18 + 1, 10**18 + 1))
    subprocess.run([PARTS, "pack", out, parts], check=True, env=os.environ | {"PART_SIZE": "59K"})
    assert sorted(path.name for path in parts.iterdir()) == ["state.00", "state.01", "state.sha256"]
    assert all(path.stat().st_size <= 59 * 1024 for path in parts.iterdir())
    subprocess.run([PARTS, "unpack", parts, again], check=True)
    found = (again / "runs" / "weights").stat()
    assert (found.st_size, found.st_mtime_ns) == (70_000, 10**18 + 1)
    (parts / "state.01").rename(parts / "elsewhere")
    missing = subprocess.run([PARTS, "unpack", parts, tmp_path / "new"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert missing.stderr == f"d1: {parts} lacks state.01, or they are damaged; copy these parts again\n"
    assert not (tmp_path / "new").exists()


def test_a_failed_command_is_named(
    table: Callable[..., int],
    calls: Callable[[], list[list[str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "fails sudoku.0.sft").touch()
    assert table() == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("d1: sudoku.0.sft failed: the disk is full; its log is ")
    assert "| base | 25.0 (" in captured.out, "the table of what is done is printed all the same"


def test_a_command_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executing, "_STOP_S", 0.3)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        executing._stop(process)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--tasks", "chess"), "--tasks chess: scale tiny has sudoku, countdown"),
        (("--methods", "ppo"), "there is no algorithm 'ppo'; there are diffu-grpo"),
        (("--set", "learner.lrr=1"), "learner.lrr"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(
    table: Callable[..., int], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    assert table(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("d1: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_a_finished_cell_needs_no_training() -> None:
    steps = _plan("tiny", TRAJECTORY)
    done = {step.place for step in steps if isinstance(step, Evaluation) and step.place.row == "base"}
    names = [step.name for step in remaining(steps, done)]
    assert "sudoku.0.base" in names, "SFT starts from it"
    only_last = {step.place for step in steps if isinstance(step, Evaluation) and step.name != "sudoku.0.trajectory.24"}
    assert [step.name for step in remaining(steps, only_last)] == [
        "sudoku.0.base",
        "sudoku.0.trajectory",
        "sudoku.0.trajectory.24",
    ]


def test_the_interval_over_seeds_is_students_and_at_least_wilsons() -> None:
    # Mean 0.5, standard deviation 0.1, t = 4.303 at two degrees of freedom: half 4.303 * 0.1 / sqrt(3).
    assert interval_of([0.4, 0.5, 0.6], 600) == pytest.approx((0.5 - 0.24844, 0.5 + 0.24844), abs=1e-5)
    assert interval_of([0.1, 0.9], 600) == (0.0, 1.0)
    wilson = Score(num_correct=0, num_problems=600).interval
    assert interval_of([0.0, 0.0, 0.0], 600) == interval_of([0.0], 600) == wilson


def test_the_table_has_measured_and_missing_rows(tmp_path: Path) -> None:
    cell = Measured(
        place=Place(task="sudoku", row="+ SFT", length=128, seed=0),
        num_correct=30,
        num_problems=100,
        training_s=61.2,
        evaluation_s=7.4,
        hardware="H100",
        date="2026-11-27",
    )
    cells = [cell, replace(cell, place=replace(cell.place, length=256), num_correct=40)]
    text = as_markdown(cells, "sudoku", [128, 256, 512], ["base", "+ SFT"])
    assert f"| base | {MISSING} | {MISSING} | {MISSING} |  |  |  |  |  |" in text
    assert (
        f"| + SFT | 30.0 (21.9 to 39.6) | 40.0 (30.9 to 49.8) | {MISSING} | 0 | 61 | 15 | H100 | 2026-11-27 |"
    ) in text
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- benchmarks.table x -->\nold\n<!-- end of benchmarks.table x -->\nb\n")
    write_between_marks(page, "benchmarks.table x", text)
    assert page.read_text() == (f"a\n<!-- benchmarks.table x -->\n\n{text}\n<!-- end of benchmarks.table x -->\nb\n")
    with pytest.raises(ValueError, match="has no line"):
        write_between_marks(page, "benchmarks.table y", text)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_tiny_table_is_made_end_to_end(tmp_path: Path) -> None:
    small = "model={d_model: 32, num_layers: 1, num_heads: 2, mlp_hidden_size: 48}"
    rollout = ("rollout.num_samplers=1", "rollout.batch_size=16")
    rounds = ("learner.num_rounds=2", "learner.groups_per_round=4", "learner.group_size=4")
    changes = (small, "sft.num_steps=3", *rollout, *rounds, "evaluation.num_problems=12", "evaluation.every_rounds=0")
    command = [sys.executable, "-m", "benchmarks.table", *TINY, "--out", str(tmp_path / "out"), "--set", *changes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(read_cells(tmp_path / "out" / "cells.jsonl")) == 12
