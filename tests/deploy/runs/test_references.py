"""Runs and checkpoints are named in one way, whichever command asks; a miss names the nearest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import UserError
from deploy.runs.listing import list_runs, point_latest_at
from deploy.runs.references import find, find_run

_RUNS = Path("runs")


@pytest.fixture
def tiny(make_run: Callable[..., Path], events: list[dict[str, Any]]) -> Path:
    """A run with two checkpoints, and a checkpoint without a run beside it."""
    run = make_run("tiny-20261122", events)
    for name in ("sft", "rl-000012"):
        _checkpoint(run / "checkpoints" / name)
    _checkpoint(run.parent.parent / "alone")
    return run


def _checkpoint(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")


@pytest.mark.parametrize("name", ["tiny-20261122", "runs/tiny-20261122", "./runs/tiny-20261122/"])
def test_a_run_is_named_by_name_or_path(tiny: Path, name: str) -> None:
    found = find(name, _RUNS)
    assert found.is_run
    assert found.directory.resolve() == find_run(name, _RUNS).resolve() == tiny


@pytest.mark.parametrize("name", ["tiny-20261122/sft", "tiny-20261122/checkpoints/sft", "runs/tiny-20261122/sft"])
def test_a_checkpoint_is_named_by_its_path_or_after_its_run(tiny: Path, name: str) -> None:
    found = find(name, _RUNS)
    assert not found.is_run
    assert found.directory.resolve() == tiny / "checkpoints" / "sft"
    assert find_run(name, _RUNS).resolve() == tiny


def test_a_miss_names_the_nearest(tiny: Path) -> None:
    for name in ("tny-20261122", "runs/tny-20261122"):
        with pytest.raises(UserError, match=r"no hub id either; did you mean tiny-20261122\?"):
            find(name, _RUNS)
        with pytest.raises(UserError, match=r"did you mean tiny-20261122\?"):
            find_run(name, _RUNS)
    for name in ("tiny-20261122/stf", "runs/tiny-20261122/checkpoints/stf"):
        with pytest.raises(UserError, match=r"has no checkpoint stf; did you mean runs/tiny-20261122/checkpoints/sft"):
            find(name, _RUNS)
    with pytest.raises(UserError, match="it has rl-000012, sft"):
        find("tiny-20261122/x", _RUNS)


def test_a_checkpoint_alone_is_no_run(tiny: Path) -> None:
    assert not find("alone", _RUNS).is_run
    with pytest.raises(UserError, match="alone is a checkpoint by itself, not one of a run"):
        find_run("alone", _RUNS)


def test_every_command_names_the_nearest(tiny: Path, d1: Callable) -> None:
    for words in (("sample", "tny-20261122", "hi"), ("export", "tny-20261122", "out"), ("serve", "tny-20261122")):
        d1(*words).assert_refused("there is no run tny-20261122 in runs", "did you mean tiny-20261122?")
    d1("runs", "show", "tny-20261122").assert_refused("did you mean tiny-20261122?")


def test_latest_is_the_run_that_was_last_begun_and_is_listed_once(
    tiny: Path, make_run: Callable[..., Path], d1: Callable
) -> None:
    for name in ("tiny-20261122", "other"):
        run = tiny if name == tiny.name else make_run(name, [])
        point_latest_at(run)
        assert find("latest", _RUNS).directory == find_run("latest", _RUNS) == _RUNS / name
        assert (run.parent / "latest" / "metrics.jsonl").is_file()
    assert sorted(run.name for run in list_runs(_RUNS)) == ["other", "tiny-20261122"]
    assert d1("runs", "show", "latest").out.startswith("other: ")


def test_what_somebody_has_called_latest_stays(tiny: Path, make_run: Callable[..., Path]) -> None:
    mine = make_run("latest", [])
    point_latest_at(tiny)
    assert not mine.is_symlink()
    assert find_run("latest", _RUNS) == _RUNS / "latest"
    point_latest_at(mine)
    assert (mine / "metrics.jsonl").is_file()


def test_a_run_that_lies_elsewhere_is_listed_through_its_link(tiny: Path) -> None:
    elsewhere = tiny.parent.parent / "elsewhere"
    tiny.rename(elsewhere)
    tiny.symlink_to(elsewhere)
    assert [run.name for run in list_runs(_RUNS)] == ["tiny-20261122"]
