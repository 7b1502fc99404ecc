"""A plan carried out: in order, once, gone on with where it stopped; with a stand-in for d1's commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import RunFailedError
from deploy.reproduce import execute as executing
from deploy.reproduce.execute import Progress, execute
from deploy.reproduce.plan import Step, plan, rows
from deploy.reproduce.report import write_report
from deploy.reproduce.scale import read_scale

# Leaves what d1's commands leave, and writes down how it was called. It fails, or waits, where a file says so.
STAND_IN = """
import json, pathlib, signal, sys, time
here, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
with (here / "calls").open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == "eval":
    name, place = words[words.index("--out") + 1].rpartition("/")[2], pathlib.Path(words[words.index("--out") + 1])
else:
    name = pathlib.Path(words[1]).stem
    place = here / "runs" / name
place.mkdir(parents=True, exist_ok=True)
if (here / f"fails {name}").exists():
    sys.exit("d1: the disk is full")
if (here / f"waits {name}").exists():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        (here / "waits").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        (here / "kept").touch()
        sys.exit(130)
if words[0] == "eval":
    cell = {"num_problems": 12, "accuracy": 0.25, "accuracy_interval": [0.1, 0.5], "mean_forwards": 9}
    (place / "results.json").write_text(json.dumps({"cells": [cell]}))
else:
    run = {"event": "run", "name": name, "commit": "abc", "hardware": "2 cores", "time_s": 0.0}
    rounds = [{"event": "round", "round": i, "policy_version": i + 2, "reward": 0.1, "time_s": i} for i in range(2)]
    lines = [run, *(rounds if words[0] == "train" else []), {"event": "done", "seconds": 2.0, "time_s": 2.0}]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def steps(scale_file: Path, tmp_path: Path) -> list[Step]:
    return plan(read_scale(str(scale_file)), tmp_path, [0], ["diffu-grpo"])


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(executing, "_TELL_EVERY_S", 0.2)
    monkeypatch.setattr(executing, "_D1", (sys.executable, str(script), str(tmp_path)))
    path = tmp_path / "calls"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _ignore(*_: Progress) -> None:
    pass


def test_every_command_is_given_once_and_the_report_is_written(
    steps: list[Step], calls: Callable[[], list[list[str]]], scale_file: Path, tmp_path: Path
) -> None:
    told: list[Progress] = []
    evaluated: list[int] = []
    execute(steps, tmp_path, told.append, lambda: evaluated.append(len(calls())))
    assert evaluated == [2, 3, 5, 6, 8, 9, 11, 12], "after each of the evaluations"
    given = calls()
    assert [words[0] for words in given] == ["sft", "eval", "eval"] * 2 + ["train", "eval", "eval"] * 2
    assert {(one.place, one.num_steps) for one in told} == {(place, 13) for place in range(1, 14)}
    assert len((tmp_path / "texts" / "sudoku.0.jsonl").read_text().splitlines()) == 40
    assert "num_steps: 3" in (tmp_path / "recipes" / "sudoku.0.sft.yaml").read_text()
    execute(steps, tmp_path, told.append, _ignore)
    assert calls() == given, "nothing is done twice"
    text = write_report(read_scale(str(scale_file)), "micro", steps, rows(["diffu-grpo"]), tmp_path)
    assert "| base | **25.0** (8.9 to 53.2) | **25.0** (8.9 to 53.2) |" in text
    assert "- commit: abc\n" in text
    assert (tmp_path / "table.md").read_text() == text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "table.json").read_text())["steps_done"] == "13 of 13"


def test_a_command_that_fails_is_named_and_gone_on_with(
    steps: list[Step], calls: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    fails = tmp_path / "fails sudoku.0.sft"
    fails.touch()
    sentence = r"^sudoku\.0\.sft failed: the disk is full; its log is .*logs/sudoku\.0\.sft\.log; the same command"
    with pytest.raises(RunFailedError, match=sentence):
        execute(steps, tmp_path, _ignore, _ignore)
    before = len(calls())
    fails.unlink()
    execute(steps, tmp_path, _ignore, _ignore)
    again = calls()[before]
    assert (again[0], again[-1]) == ("sft", "--resume")
    assert again[1].endswith("recipes/sudoku.0.sft.yaml")


def test_ctrl_c_lets_the_command_keep_what_it_has(
    steps: list[Step], calls: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    (tmp_path / "waits sudoku.0.sft").touch()

    def interrupt(progress: Progress) -> None:
        if (tmp_path / "waits").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(steps, tmp_path, interrupt, _ignore)
    assert (tmp_path / "kept").exists()
    assert len(calls()) == 4


def test_a_command_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executing, "_STOP_S", 0.3)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", ignores]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        executing._stop(process)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--scale", "huge"), "--scale huge is none that there is; take one of 8b, tiny, or a .yaml file"),
        (("--scale", "8b"), "--scale 8b trains SFT on s1K: name it with --sft-data s1k.jsonl"),
        (("--sft-data", "x.jsonl"), "--scale tiny trains SFT on its tasks' own labels; leave out --sft-data"),
        (("--seeds", "0,a"), "--seeds 0,a: a is no seed; write --seeds 0,1,2"),
        (("--algorithms", "ppo"), "the recipe of sudoku.0.ppo: learner: there is no algorithm 'ppo'; there are diffu"),
    ],
)
def test_bad_input_is_a_sentence(d1: Callable[..., Any], workdir: Path, words: tuple[str, ...], sentence: str) -> None:
    d1("reproduce", *words).assert_refused(sentence)
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("{name: sums}", "micro.0.texts: there is no unlabelled text for task sums"),
        (
            "{name: countdown, prompt: compact, max_number: 2}",
            "micro.0.texts: the train split of countdown has 18 problems with this config, but 40 were asked for",
        ),
    ],
)
def test_a_task_without_texts_is_a_sentence(d1: Callable[..., Any], scale_file: Path, task: str, sentence: str) -> None:
    text = scale_file.read_text().replace("{name: sudoku, prompt: compact}", task)
    scale_file.write_text(text.replace("  sudoku:\n", "  micro:\n"))
    words = ("reproduce", "--scale", str(scale_file), "--seeds", "0", "--out", str(scale_file.parent / "out"))
    d1(*words).assert_refused(sentence)


def test_a_folder_of_another_scale_is_refused(
    d1: Callable[..., Any], calls: Callable[[], list[list[str]]], scale_file: Path
) -> None:
    # The stand-in leaves its runs where it is.
    words = ("reproduce", "--scale", str(scale_file), "--seeds", "0", "--out", str(scale_file.parent))
    assert "| base | **25.0**" in d1(*words).out
    given = len(calls())
    scale_file.write_text(scale_file.read_text().replace("num_rounds: 2", "num_rounds: 3"))
    d1(*words).assert_refused("has a reproduction at another scale", "take another --out")
    assert len(calls()) == given


def test_the_table_of_what_is_done_is_there_when_a_later_command_fails(
    d1: Callable[..., Any], calls: Callable[[], list[list[str]]], scale_file: Path
) -> None:
    (scale_file.parent / "fails sudoku.0.sft").touch()
    ended = d1("reproduce", "--scale", str(scale_file), "--seeds", "0", "--out", str(scale_file.parent))
    assert "sudoku.0.sft failed: the disk is full" in ended.err
    assert "| base | **25.0**" in (scale_file.parent / "table.md").read_text()
    assert len(calls()) == 4


def test_a_dry_run_prints_the_commands_and_writes_nothing(d1: Callable[..., Any], workdir: Path) -> None:
    ended = d1("reproduce", "--dry-run", "--seeds", "0")
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0].startswith("# 4000 texts into ")
    assert sum(line.startswith("d1 train ") for line in lines) == 4
    assert sum(line.startswith("d1 eval ") for line in lines) == 24
    assert lines[-1] == "Nothing stands in its way. Nothing was started or written."
    assert list(workdir.iterdir()) == []


def test_a_dry_run_of_what_cannot_run_here_says_why_once(d1: Callable[..., Any], scale_file: Path) -> None:
    scale_file.write_text(scale_file.read_text().replace("recipe:\n  model", "recipe:\n  device: cuda\n  model", 1))
    ended = d1("reproduce", "--dry-run", "--scale", str(scale_file))
    assert ended.status == 2
    problems = [line for line in ended.out.splitlines() if line.startswith("problem: ")]
    assert "GPU" in problems[0]
    assert all(line.endswith("(sudoku.0.base)") for line in problems), "and not again for each training"
    assert ended.err.startswith("d1: it cannot run here: ")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_smallest_table_is_made_for_real(scale_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "reproduce", "--scale", str(scale_file)]
    out = tmp_path / "out"
    ended = subprocess.run(
        [*command, "--seeds", "0", "--algorithms", "recipe", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((out / "table.json").read_text())
    assert len(found["cells"]) == 12
    assert found["steps_done"] == "19 of 19"
