"""Stored preference pairs on the command line: what is refused, and what a run on them shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.capacity.flops import sampling_flops
from deploy.capacity.shape import policy_shape
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.progress import ProgressDisplay
from deploy.runs.run_directory import create_run_dir, make_spec

VRPO = ("learner.algorithm=vrpo", "learner.pairs=pairs.jsonl")


@pytest.fixture
def pairs(recipe_file: Path) -> Callable[..., None]:
    """Write pairs to the file: ten good ones, and then these rows."""

    def write(*rows: dict[str, Any]) -> None:
        good = [{"prompt": f"{n}+1", "chosen": str(n + 1), "rejected": str(n)} for n in range(10)]
        text = "".join(json.dumps(row) + "\n" for row in (*good, *rows))
        recipe_file.with_name("pairs.jsonl").write_text(text)

    return write


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "1", "rejected": "2"}, "prompt is missing; it should be a text or a list of turns"),
        ({"prompt": "1", "chosen": "2"}, "rejected is missing; it should have prompt, chosen and rejected"),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, "rejected is empty"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "chosen and rejected are equal"),
        (
            {"prompt": "1", "chosen": "2", "rejected": "3" * 99},
            "rejected has 99 tokens, and rollout.sampling.gen_length",
        ),
    ],
)
def test_a_bad_line_ends_the_command_before_anything_starts(
    recipe_file: Path, pairs: Callable, d1: Callable, row: dict[str, Any], why: str, dry_run: bool
) -> None:
    pairs(row)
    ended = d1("train", "tiny.yaml", *VRPO, *["--dry-run"] * dry_run)
    said = f"learner.pairs: {recipe_file.with_name('pairs.jsonl')}, line 11: "
    if dry_run:
        assert said in ended.out.replace("\n", " ")
        assert why in ended.out.replace("\n", " ")
        assert (ended.status, ended.err) == (2, "d1: tiny cannot run: 1 problem, listed above\n")
    else:
        ended.assert_refused(said, why)
    assert not (recipe_file.parent / "runs" / "tiny").exists()


def test_a_dry_run_finds_no_problem_with_good_pairs(pairs: Callable, d1: Callable) -> None:
    pairs()
    ended = d1("train", "tiny.yaml", *VRPO, "--dry-run")
    assert (ended.status, ended.err) == (0, "")
    assert "No problems found" in ended.out


def test_a_run_whose_pairs_are_gone_is_not_resumed(recipe_file: Path, pairs: Callable, d1: Callable) -> None:
    pairs()
    recipe = load_recipe(recipe_file, [*VRPO])
    create_run_dir(recipe, make_spec(recipe, Stages.ALL), start_from=None).close()
    recipe_file.with_name("pairs.jsonl").unlink()
    d1("train", "tiny.yaml", *VRPO, "--resume").assert_refused("learner.pairs: ", "no such file or directory")


def test_pairs_for_another_objective_are_refused(pairs: Callable, d1: Callable) -> None:
    pairs()
    d1("train", "tiny.yaml", "learner.pairs=pairs.jsonl").assert_refused(
        "pairs is pairs.jsonl, and objective clipped_ratio learns from graded completions; take the objective "
        "preference (learner.algorithm=vrpo), or leave pairs out"
    )


def test_filters_with_pairs_are_refused(pairs: Callable, d1: Callable) -> None:
    pairs()
    d1("train", "tiny.yaml", *VRPO, "learner.filters.truncated=true").assert_refused(
        "filters select among graded completions, and pairs has none; leave one of them out"
    )


def test_the_rounds_sample_nothing(recipe_file: Path) -> None:
    """A pair is a group of two, whatever the recipe has; and a round of more pairs than problems is fine."""
    recipe = load_recipe(recipe_file, [*VRPO, "learner.group_size=8", "learner.groups_per_round=100000"])
    assert recipe.learner.group_size == 2
    assert recipe.work_units_per_round == 0
    assert sampling_flops(recipe, policy_shape(recipe)) == 0
    spec = make_spec(recipe, Stages.ALL)
    assert spec.learner.pairs == recipe_file.with_name("pairs.jsonl"), "also in another current directory"


def _round(recorder: Any, index: int, **values: Any) -> None:
    recorder.add(
        "round", 9, round=index, policy_version=index + 2, num_trained_completions=8, tokens_per_s=90.0, **values
    )


def test_a_log_shows_the_pairs_and_how_many_are_preferred(recorder: Any) -> None:
    lengths = {"mean_chosen_tokens": 83.4, "mean_rejected_tokens": 95.6}
    recorder.add("pairs", num_pairs=4000, num_overlong=3, **lengths)
    recorder.add("phase", phase="rl", num_steps=3)
    _round(recorder, 0)
    _round(recorder, 1, preferred=0.625, margin=0.12345)
    file = StringIO()
    with ProgressDisplay(Console(file=file, width=140)) as display:
        for event in recorder.events:
            display(event)
    lines = [line.partition(" s  ")[2] for line in file.getvalue().splitlines()]
    assert lines == [
        "4000 pairs: 83 tokens chosen, 96 rejected, 3 with too long a prompt",
        "RL: 3 rounds",
        "RL 1/3 rounds  preferred 0 %  margin 0  90 tokens/s",
        "RL 2/3 rounds  preferred 62 %  margin 0.1235  90 tokens/s",
    ]


def test_views_of_a_run_leave_out_the_reward_that_it_does_not_have(
    recorder: Any, make_run: Callable, d1: Callable, workdir: Path
) -> None:
    recorder.add("run", name="tiny", seed=0, commit="abc", hardware="2 cores", versions={})
    recorder.add("phase", phase="rl", num_steps=2)
    _round(recorder, 0, preferred=0.5, margin=0.0)
    _round(recorder, 1, preferred=1.0, margin=0.3)
    recorder.evaluation("rl", 100, 2)
    make_run("tiny", recorder.events)
    shown = d1("status", "tiny")
    assert shown.status == 0
    assert "preferred" in shown.out
    assert not {"reward", "nan"} & set(shown.out.split())
    assert d1("report", "tiny", "--out", "report.html").status == 0
    page = (workdir / "report.html").read_text()
    assert "Margin of the preferred" in page
    assert "mean reward of a completion" not in page
