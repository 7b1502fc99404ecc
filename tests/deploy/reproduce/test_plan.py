"""The plan of a reproduction: each step finds what it needs, and each row is the method that it is named after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe
from deploy.reproduce.plan import Evaluation, Step, Texts, Training, plan, rows
from deploy.reproduce.scale import read_scale, scale_names
from deploy.reproduce.texts import unlabelled
from learner.estimators import OneStepConfig, TrajectoryConfig
from rewards import Split, make_task

OUT = Path("/out")
RECIPES = Path(__file__).parents[3] / "recipes"


def _plan(name: str, *algorithms: str, seeds: Sequence[int] | None = None) -> list[Step]:
    scale = read_scale(name, Path("s1k.jsonl") if name == "8b" else None)
    return plan(scale, OUT, seeds or scale.seeds, algorithms or ("diffu-grpo",))


def _trainings(scale_file: Path) -> dict[str, Training]:
    """Of the last seed, by row."""
    steps = _plan(str(scale_file), "diffu-grpo", "recipe")
    return {step.row: step for step in steps if isinstance(step, Training)}


@pytest.mark.parametrize("name", scale_names())
def test_each_step_finds_what_it_needs(name: str) -> None:
    made = set[str]()
    steps = _plan(name)
    for step in steps:
        if isinstance(step, Texts):
            made.add(str(step.path))
        elif isinstance(step, Evaluation):
            assert step.words[1] in made or not step.words[1].startswith("/out"), step.name
        else:
            needs = [step.start_from, step.recipe.model.checkpoint, step.recipe.sft.data]
            ours = [str(one) for one in needs if one is not None and str(one).startswith("/out")]
            assert set(ours) <= made, step.name
            made.add(step.checkpoint)
    assert len({step.name for step in steps}) == len(steps)


def test_the_tiny_table_is_whole() -> None:
    evaluated = [step for step in _plan("tiny") if isinstance(step, Evaluation)]
    asked = {(step.row, step.task, step.length, step.seed) for step in evaluated}
    wanted = ["base", "+ SFT", "+ diffu-grpo", "+ SFT + diffu-grpo"]
    assert rows(["diffu-grpo"]) == wanted
    lengths = {"sudoku": (18, 24, 36), "countdown": (10, 16, 24)}
    places = [(task, length) for task, found in lengths.items() for length in found]
    assert asked == {(row, *place, seed) for row in wanted for place in places for seed in (0, 1, 2)}
    assert len(evaluated) == len(asked) == 72


def test_the_tiny_scale_has_the_problems_that_it_asks_for() -> None:
    recipes = {step.recipe.task.name: step for step in _plan("tiny", seeds=[0]) if isinstance(step, Texts)}
    assert set(recipes) == {"sudoku", "countdown"}
    for step in recipes.values():
        recipe = step.recipe
        task = make_task(recipe.task)
        assert len(task.problems(Split.TRAIN, recipe.num_train_problems, 0)) == recipe.num_train_problems
        assert len(task.problems(Split.HELDOUT, recipe.evaluation.num_problems, 0)) == 600
        assert len(unlabelled(recipe.task, recipe.num_train_problems, step.count, 0)) == step.count


def test_a_seed_is_done_before_the_next_begins(scale_file: Path) -> None:
    seeds = [step.recipe.seed for step in _plan(str(scale_file)) if isinstance(step, Training)]
    assert seeds == [0] * 4 + [1] * 4


def test_rows_start_from_what_they_are_named_after(scale_file: Path) -> None:
    trainings = {
        step.row: step for step in _plan(str(scale_file), "diffu-grpo", "recipe") if isinstance(step, Training)
    }
    base, sft = trainings["base"], trainings["+ SFT"]
    assert str(base.recipe.sft.data) == "/out/texts/sudoku.1.jsonl"
    assert (base.start_from, base.recipe.model.checkpoint) == (None, None)
    assert base.recipe.sft.max_tokens == sft.recipe.canvas_tokens == 40, "it is pre-trained on the canvas of SFT"
    assert base.recipe.canvas_tokens == 44, "and takes the longest that is evaluated"
    assert str(sft.recipe.model.checkpoint) == base.checkpoint == "/out/runs/sudoku.1.base/checkpoints/sft"
    assert sft.recipe.sft.data is None
    assert trainings["+ diffu-grpo"].start_from == trainings["+ recipe"].start_from == base.checkpoint
    assert trainings["+ SFT + diffu-grpo"].start_from == trainings["+ SFT + recipe"].start_from == sft.checkpoint
    assert trainings["+ recipe"].checkpoint == "/out/runs/sudoku.1.recipe/checkpoints/rl-000002"


def test_an_algorithm_brings_its_own_method_and_the_scales_settings_for_it(scale_file: Path) -> None:
    trainings = {
        step.row: step for step in _plan(str(scale_file), "diffu-grpo", "recipe") if isinstance(step, Training)
    }
    theirs, own = (trainings[row].recipe.learner for row in ("+ diffu-grpo", "+ recipe"))
    assert isinstance(theirs.estimator, OneStepConfig)
    assert isinstance(own.estimator, TrajectoryConfig)
    assert (theirs.inner_updates, theirs.num_rounds) == (3, 2)


def test_the_8b_scale_has_one_sft_for_all_tasks_and_the_first_d1s_numbers() -> None:
    trainings = [step for step in _plan("8b") if isinstance(step, Training)]
    assert sum(step.row == "+ SFT" for step in trainings) == 1
    assert {step.start_from for step in trainings if step.row == "+ diffu-grpo"} == {"GSAI-ML/LLaDA-8B-Instruct"}
    learners = {step.task: step.recipe.learner for step in trainings if step.start_from}
    assert {task: learner.inner_updates for task, learner in learners.items()} == {
        "gsm8k": 12,
        "math500": 12,
        "countdown": 8,
        "sudoku": 8,
    }
    for learner in learners.values():
        assert (learner.groups_per_round * learner.group_size, learner.lr, learner.max_grad_norm) == (96, 3e-6, 0.2)
    words = [step.words for step in _plan("8b") if isinstance(step, Evaluation)]
    assert all(one[one.index("--protocol") :][:2] == ("--protocol", "d1") for one in words)


def test_the_8b_scale_trains_on_gsm8k_as_the_recipe_of_the_first_d1_does() -> None:
    """But for the method, which a row names, and the draws, which not every method could learn from."""
    recipe = load_recipe(RECIPES / "llada-gsm8k.yaml", ["sft.data=s1k.jsonl", "sft.num_steps=1240"])
    trainings = [step for step in _plan("8b", "diffu-grpo-parity", seeds=[42]) if isinstance(step, Training)]
    of_row = {step.row: step.recipe for step in trainings if step.task in (None, "gsm8k")}
    sft, rounds = of_row["+ SFT"], of_row["+ diffu-grpo-parity"]
    assert sft.sft.model_dump(exclude={"data"}) == recipe.sft.model_dump(exclude={"data"})
    assert rounds.learner == recipe.learner
    for section in ("model", "sharding", "num_train_problems", "seed"):
        assert getattr(rounds, section) == getattr(recipe, section), section
    drawing = {"drawing": recipe.rollout.sampling.drawing}
    assert rounds.rollout.sampling.model_copy(update=drawing) == recipe.rollout.sampling
    assert rounds.task.model_copy(update={"protocol": "fixed"}) == recipe.task


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("lengths: [18, 24]", "tasks.sudoku.lengths"),
        ("about: As", "abuot is no key of a recipe; did you mean about"),
        ("seeds: [0, 1]", "seeds"),
    ],
)
def test_a_scale_that_is_none_is_refused(scale_file: Path, change: str, sentence: str) -> None:
    text = scale_file.read_text()
    empty = {"about: As": "abuot: As"}.get(change, change.partition("[")[0] + "[]")
    scale_file.write_text(text.replace(change, empty))
    with pytest.raises(UserError, match=sentence):
        read_scale(str(scale_file))
