"""Teacher of a run (distillation): what is required of it before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.errors import UserError
from deploy.job.submit import _absolute_paths
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import check_creatable, create_run_dir, make_spec
from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import init_weights
from learner.objectives import DistillationConfig
from tests.tiny_policy import config_of


@pytest.fixture
def tokenizer(recipe_file: Path) -> Path:
    """The directory of a policy's tokenizer."""
    recipe = load_recipe(recipe_file, ["name=scratch"])
    spec = make_spec(recipe, Stages.ALL)
    create_run_dir(recipe, spec, start_from=None).close()
    return spec.initial_checkpoint


def _policy(tokenizer: Path, name: str, **changes: Any) -> Path:
    """A checkpoint of an autoregressive origin."""
    config = config_of(ChatTokenizer(tokenizer), max_sequence_length=changes.pop("max_sequence_length", 256))
    config = TransformerConfig.model_validate({**config.model_dump(), "family": "a2d-llama", **changes})
    model = make_model(config)
    init_weights(model, seed=0)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_checkpoint(directory := tokenizer.parent / name, config, weights, tokenizer)
    return directory


def _refusal(recipe_file: Path, policy: Path | None, *overrides: str) -> str:
    recipe = load_recipe(recipe_file, ["name=learning", "learner.algorithm=opdlm", *overrides])
    with pytest.raises(UserError) as refused:
        check_creatable(recipe, make_spec(recipe, Stages.RL), policy, 10)
    return str(refused.value)


def test_a_teacher_must_be_a_checkpoint_that_reads_the_policys_canvases(recipe_file: Path, tokenizer: Path) -> None:
    policy, field = _policy(tokenizer, "policy"), "learner.objective.teacher"
    wider = _policy(tokenizer, "wider", vocab_size=len(ChatTokenizer(tokenizer)) + 1)
    short = _policy(tokenizer, "short", max_sequence_length=8)
    for teacher, why in (
        ("nowhere", "nowhere is not a checkpoint: it has no config.json"),
        (wider, f"{field} {wider} has a vocabulary of "),
        (short, f"{field} {short} takes canvases of 8 tokens, and those of the rounds have "),
        (tokenizer, f"{field} {tokenizer} is a llada policy, and no autoregressive model has its weights; name "),
    ):
        found = _refusal(recipe_file, policy, f"{field}={teacher}")
        assert why in found
        assert "\n" not in found


def test_without_a_teacher_the_start_of_the_run_must_be_one(recipe_file: Path, tokenizer: Path) -> None:
    found = _refusal(recipe_file, None)
    assert "learner.objective.teacher is null, and the policy that the run starts from is a llada policy" in found
    recipe = load_recipe(recipe_file, ["name=learning", "learner.algorithm=opdlm"])
    for changes in ({}, {"block_length": 4}, {"predicts_next": True}):
        start = _policy(tokenizer, "policy", **changes)
        check_creatable(recipe, make_spec(recipe, Stages.RL), start, 10)


def test_a_run_without_rounds_needs_no_teacher(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["name=learning", "learner.algorithm=opdlm"])
    check_creatable(recipe, make_spec(recipe, Stages.SFT), None, 10)


def test_a_teacher_is_found_from_every_directory(recipe_file: Path, tokenizer: Path) -> None:
    teacher = _policy(tokenizer, "policy").relative_to(Path.cwd())
    overrides = ["name=learning", "learner.algorithm=opdlm", f"learner.objective.teacher={teacher}"]
    recipe = load_recipe(recipe_file, overrides)
    objective = make_spec(recipe, Stages.RL).learner.objective
    assert isinstance(objective, DistillationConfig)
    assert objective.teacher == teacher.absolute()
    assert f"learner.objective.teacher={teacher.resolve()}" in _absolute_paths(recipe)


def test_groups_that_teach_a_reward_nothing_are_not_replaced(recipe_file: Path) -> None:
    with pytest.raises(UserError, match="max_oversampling is 2 and replaces groups whose rewards are all equal"):
        load_recipe(recipe_file, ["learner.algorithm=opdlm", "rollout.max_oversampling=2"])
