"""`d1 runs ls` and the results in `d1 status`: every run is listed and shown, even with hostile text."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Events = list[dict[str, Any]]

HOSTILE = "[bold red]boo[/not-open] [link=file:///etc]x[/link] \x1b[2J\x1b]0;pwned\x07 \u202etxet \r done"


def _sample(**values: Any) -> dict[str, Any]:
    return {
        "round": 3,
        "policy_version": 4,
        "problem_id": "sums/1",
        "prompt": "3 7 9",
        "completion": "309",
        "reward": 1.0,
        "reward_parts": {"correct": 1.0},
        "correct": True,
        "step_map": [0, 1, 2, 2],
    } | values


def _age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(directory / "metrics.jsonl", (then, then))


def _rows(table: str) -> list[list[str]]:
    """Return the words of a table's rows, below its headings."""
    return [line.split() for line in table.splitlines()[1:]]


def test_ls_lists_runs_newest_first_with_state_and_results(make_run: Callable, events: Events, d1: Callable) -> None:
    _age(make_run("old", events), 7200)
    _age(make_run("crashed", events[:25]), 3600)
    _age(make_run("going", events[:30]), 5)
    ended = d1("runs", "ls")
    assert ended.status == 0
    rows = _rows(ended.out)
    assert [row[0] for row in rows] == ["going", "crashed", "old"]
    assert [row[1] for row in rows] == ["running?", "stopped?", "finished"]
    assert " ".join(rows[2][2:]) == "2 h sums 12 50.0 % 50.0 % 2 min ▁▂▂▃▄▅▆▆▇█"


def test_ls_fits_into_80_columns(
    make_run: Callable, events: Events, d1: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    make_run("countdown-1", events)
    assert "…" not in d1("runs", "ls").out


def test_ls_keeps_names_whole_and_leaves_out_what_does_not_fit(
    make_run: Callable, events: Events, d1: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, longest = "tiny-20261122-131142-with-another-learning-rate", "x" * 80
    monkeypatch.setenv("COLUMNS", "80")
    make_run(long, events)
    table = d1("runs", "ls").out
    assert _rows(table)[0][:2] == [long, "running?" if "running?" in table else "finished"]
    assert "held-out" in table
    make_run(longest, events)
    table = d1("runs", "ls").out
    assert all(len(line) <= 80 for line in table.splitlines())
    assert long in table
    assert longest in "".join(table.split())


def test_ls_skips_other_directories_and_lists_a_damaged_run(make_run: Callable, events: Events, d1: Callable) -> None:
    directory = make_run("torn", events)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"event": "rou')
    (directory / "recipe.yaml").write_text("task: [")
    (directory.parent / "notes").mkdir()
    make_run(".partial.partial", events)
    ended = d1("runs", "ls")
    assert ended.status == 0
    assert [row[0] for row in _rows(ended.out)] == ["torn"]


def test_ls_without_runs(workdir: Path, d1: Callable) -> None:
    d1("runs", "ls").assert_refused("there is no directory runs; `d1 train` makes it, or give --runs-dir DIR")
    (workdir / "runs").mkdir()
    assert d1("runs", "ls").out == "no runs in runs\n"


def test_status_ends_with_the_results_the_curves_and_three_samples(
    make_run: Callable, events: Events, d1: Callable
) -> None:
    samples = [_sample(round=index, completion=f"answer {index}") for index in range(5)]
    make_run("tiny", events, samples)
    ended = d1("status", "tiny")
    assert ended.status == 0
    for part in ("tiny: finished", "SFT + RL", "50.0 %"):
        assert part in ended.out
    assert "reward" in ended.out
    assert "5 █▁ 1.5" in ended.out, "the held-out loss of SFT"
    assert "▁▂▂▃▄▄▅▅▆▇▇█" in ended.out
    assert [f"answer {index}" in ended.out for index in range(5)] == [False, False, True, True, True]
    assert "round 4, version 4, sums/1: right, reward 1 (correct 1), 3 denoise steps" in ended.out


def test_status_takes_a_path_too(make_run: Callable, events: Events, d1: Callable) -> None:
    directory = make_run("tiny", events)
    directory.rename(directory.parent.parent / "moved")
    assert "moved: finished" in d1("status", "./moved").out


@pytest.mark.parametrize("field", ["prompt", "completion", "problem_id"])
def test_hostile_text_is_shown_and_not_obeyed(field: str, make_run: Callable, events: Events, d1: Callable) -> None:
    make_run("tiny", events, [_sample(**{field: HOSTILE}), _sample(reward_parts={HOSTILE: 1.0})])
    ended = d1("status", "tiny")
    assert ended.status == 0
    assert "[bold red]boo[/not-open]" in ended.out
    assert "\\u001b[2J\\u001b]0;pwned\\u0007" in ended.out
    assert "\\u202etxet" in ended.out
    for char in ("\x1b", "\x07", "\r", "\u202e"):
        assert char not in ended.out


def test_a_hostile_recipe_is_listed_and_not_obeyed(make_run: Callable, events: Events, d1: Callable) -> None:
    directory = make_run("tiny", events)
    (directory / "recipe.yaml").write_text('task: {name: "[red]\\e[2J"}\nseed: "[/]"\nlearner: 3\n')
    assert d1("status", "tiny").status == 0
    ended = d1("runs", "ls")
    assert ended.status == 0
    assert "[red]\\u001b[2J" in ended.out
    assert "\x1b" not in ended.out


def test_very_long_completions_are_cut(make_run: Callable, events: Events, d1: Callable) -> None:
    make_run("tiny", events, [_sample(completion="x" * 1_000_000)])
    assert len(d1("status", "tiny").out) < 20_000


def test_a_run_that_has_just_begun_can_be_shown(make_run: Callable, d1: Callable) -> None:
    make_run("tiny", [])
    assert "tiny: running; last update" in d1("status", "tiny").out
    assert d1("runs", "ls").status == 0


def test_a_run_that_is_not_there_is_refused_with_the_nearest(make_run: Callable, events: Events, d1: Callable) -> None:
    make_run("countdown-small", events)
    d1("status", "countdwn-small").assert_refused(
        "there is no run countdwn-small in runs", "did you mean countdown-small?"
    )
    d1("serve", "xyz").assert_refused("there is no run xyz in runs", "`d1 runs ls` lists the runs")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The runs for which a service was started."""
    names: list[tuple[str, int | None]] = []
    monkeypatch.setattr(
        "deploy.service.on_ray.launch.serve_run",
        lambda run_dir, host, port: names.append((run_dir.name, port)),
    )
    return names


def _add_checkpoint(run_dir: Path, phase: str = "rl") -> None:
    directory = run_dir / "checkpoints" / phase
    directory.mkdir(parents=True)
    state = json.dumps({"phase": phase, "round": 1, "policy_version": 2, "rl_seconds": 1.0}).encode()
    (directory / "trainer_state.json").write_bytes(state)
    (directory / "manifest.json").write_text(json.dumps({"trainer_state.json": hashlib.sha256(state).hexdigest()}))


def test_serve_without_a_name_takes_the_newest_run_that_has_something_to_serve(
    make_run: Callable, events: Events, d1: Callable, served: list[tuple[str, int | None]]
) -> None:
    for age, name in enumerate(("begun", "control", "newest", "old")):
        _age(make_run(name, events), 60.0 * (age + 1))
    _add_checkpoint(Path("runs/control"), "control")
    _add_checkpoint(Path("runs/newest"))
    _add_checkpoint(Path("runs/old"))
    assert d1("serve", "--port", "8123").status == 0
    assert d1("serve", "old").status == 0
    assert served == [("newest", 8123), ("old", None)]


def test_serve_without_a_run_says_how_to_make_one(
    make_run: Callable, events: Events, d1: Callable, served: list[tuple[str, int | None]]
) -> None:
    d1("serve").assert_refused("nothing in runs can be served: there is no run in it", "`make train`")
    make_run("begun", events)
    d1("serve").assert_refused("nothing in runs can be served: no run in it has a checkpoint yet", "`make train`")
    assert served == []


def test_dtype_is_for_checkpoints_and_a_run_has_its_recipes(
    make_run: Callable,
    events: Events,
    d1: Callable,
    served: list[tuple[str, int | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run("tiny", events)
    _add_checkpoint(Path("runs/tiny"))
    for named in ((), ("tiny",)):
        d1("serve", *named, "--dtype", "bfloat16").assert_refused(
            "--dtype is for checkpoints; a run has rollout.engine.dtype of its recipe"
        )
    assert served == []
    asked: list[str] = []
    monkeypatch.setattr(
        "deploy.service.on_ray.launch.serve_checkpoint", lambda _directory, _host, _port, dtype: asked.append(dtype)
    )
    (Path("runs/tiny/checkpoints/rl") / "config.json").write_text("{}")
    for words in ((), ("--dtype", "bfloat16")):
        assert d1("serve", "runs/tiny/checkpoints/rl", *words).status == 0
    assert asked == ["float32", "bfloat16"]
