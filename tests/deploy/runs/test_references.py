"""Names of runs and checkpoints: one syntax in all commands, and the nearest name for a miss."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from actors.checkpoints.selection import Position
from actors.run_log import append_event
from actors.spec import Phase
from deploy.errors import UserError
from deploy.runs.listing import list_runs, point_latest_at
from deploy.runs.references import find, find_checkpoint_of, find_run, is_run
from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.networks import make_model

_RUNS = Path("runs")


@pytest.fixture
def tiny(make_run: Callable[..., Path], events: list[dict[str, Any]]) -> Path:
    """A run with two checkpoints, and a checkpoint outside of any run."""
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
    assert is_run(found)
    assert found.resolve() == find_run(name, _RUNS).resolve() == tiny


@pytest.mark.parametrize("name", ["tiny-20261122/sft", "tiny-20261122/checkpoints/sft", "runs/tiny-20261122/sft"])
def test_a_checkpoint_is_named_by_its_path_or_after_its_run(tiny: Path, name: str) -> None:
    found = find(name, _RUNS)
    assert not is_run(found)
    assert found.resolve() == tiny / "checkpoints" / "sft"
    assert find_run(name, _RUNS).resolve() == tiny


def _trained(run: Path, *others: tuple[str, Position]) -> None:
    """Write the checkpoints of a run with two versions of its rounds, or `others`."""
    config = TransformerConfig(
        vocab_size=8, d_model=8, num_layers=1, num_heads=2, num_kv_heads=2, mlp_hidden_size=8, max_sequence_length=4,
        mask_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    weights = dict(make_model(config).named_parameters())
    rounds = (
        (name, Position(phase=phase, round=version - 1, policy_version=version, rl_seconds=0.0))
        for name, phase, version in (("sft", Phase.SFT, 1), ("rl-000012", Phase.RL, 13), ("rl-000024", Phase.RL, 25))
    )
    for name, position in others or rounds:
        directory = run / "checkpoints" / name
        shutil.rmtree(directory, ignore_errors=True)
        save_checkpoint(directory, config, weights, run.parent, trainer_state=asdict(position))


def test_a_run_within_its_first_stage_says_that_its_policy_is_untrained(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tiny / "checkpoints")
    within = Position(phase=Phase.SFT, round=0, policy_version=0, rl_seconds=0.0, step=30)
    _trained(tiny, ("initial", replace(within, phase=Phase.UNTRAINED, step=None)), ("sft-000030", within))
    assert find_checkpoint_of("tiny-20261122", _RUNS).name == "initial"
    assert "the newest checkpoint within a stage is tiny-20261122/sft-000030" in capsys.readouterr().err
    assert find_checkpoint_of("tiny-20261122/sft-000030", _RUNS).name == "sft-000030"
    assert capsys.readouterr().err == ""


def test_last_is_the_newest_checkpoint_and_best_what_validation_chose(tiny: Path) -> None:
    _trained(tiny)
    assert find("tiny-20261122/last", _RUNS).name == "rl-000024"
    with pytest.raises(UserError, match=r"has no validation results, .* tiny-20261122/last is the newest"):
        find("tiny-20261122/best", _RUNS)
    for version, right in ((1, 3), (13, 5), (25, 4)):
        scored = {"policy_version": version, "round": version - 1, "num_correct": right, "num_problems": 10}
        append_event(tiny, "evaluation", label="validation", **scored)
    for name in ("tiny-20261122/best", "runs/tiny-20261122/best"):
        found = find(name, _RUNS)
        assert (found.name, is_run(found)) == ("rl-000012", False)
        assert find_run(name, _RUNS).resolve() == tiny
    shutil.rmtree(tiny / "checkpoints" / "rl-000012")
    with pytest.raises(UserError, match="has no checkpoint of version 13, its best; tiny-20261122/last is the newest"):
        find("tiny-20261122/best", _RUNS)
    _checkpoint(tiny / "checkpoints" / "best")
    assert find("tiny-20261122/best", _RUNS).name == "best", "a checkpoint of that name goes before"


def test_an_unknown_reference_suggests_the_closest_name(tiny: Path) -> None:
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
    assert not is_run(find("alone", _RUNS))
    with pytest.raises(UserError, match="alone is a checkpoint by itself, not one of a run"):
        find_run("alone", _RUNS)


def test_every_command_names_the_nearest(tiny: Path, d1: Callable) -> None:
    for words in (("sample", "tny-20261122", "hi"), ("export", "tny-20261122", "out"), ("serve", "tny-20261122")):
        d1(*words).assert_refused("there is no run tny-20261122 in runs", "did you mean tiny-20261122?")
    d1("status", "tny-20261122").assert_refused("did you mean tiny-20261122?")


def test_latest_is_the_run_that_was_last_begun_and_is_listed_once(
    tiny: Path, make_run: Callable[..., Path], d1: Callable
) -> None:
    for name in ("tiny-20261122", "other"):
        run = tiny if name == tiny.name else make_run(name, [])
        point_latest_at(run)
        assert find("latest", _RUNS) == find_run("latest", _RUNS) == _RUNS / name
        assert (run.parent / "latest" / "metrics.jsonl").is_file()
    assert sorted(run.name for run in list_runs(_RUNS)) == ["other", "tiny-20261122"]
    assert d1("status", "latest").out.startswith("other: ")


def test_a_file_named_latest_is_left_alone(tiny: Path, make_run: Callable[..., Path]) -> None:
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
