"""Planned FLOP equal what the learner and PyTorch count in a real learner and a real sampler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from actors.spec import sampler_facts
from deploy.capacity.flops import learning_canvases, learning_flops, sampling_flops
from deploy.capacity.shape import policy_shape
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from learner.learner import Learner
from learner.model.networks import make_model
from learner.model.transformer import init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.planning.flops import as_leaves, full_group
from rollout.config import EngineConfig
from rollout.request import Request
from rollout.sampler import Sampler

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = ("model={d_model: 32, num_layers: 2, num_heads: 2, mlp_hidden_size: 48}", "rollout.max_prompt_tokens=32")
EXACT = "learner.estimator={name: trajectory, steps_per_segment: 1, law: sampler}"


def _recipe(recipe_file: Path, *overrides: str) -> Recipe:
    return load_recipe(recipe_file, [*SMALL, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.algorithm=diffu-grpo", "learner.inner_updates=3"),
        ("learner.algorithm=diffu-grpo", "learner.num_minibatches=2", "learner.inner_updates=2"),
        ("learner.algorithm=tba",),
        ("learner.algorithm=spg", "learner.group_size=2"),
        ("learner.algorithm=cj-grpo", "learner.value={}", "learner.group_size=2", "learner.inner_updates=2"),
        ("learner.algorithm=dmpo", "learner.group_size=2"),
        ("learner.algorithm=opdlm", "learner.group_size=2", "learner.num_minibatches=1"),
        ("learner.algorithm=d-opsd", "rollout.sampling={gen_length: 32, block_length: 8, num_denoise_steps: 8}"),
        ("learner.algorithm=mdpo", "learner.group_size=2", "learner.inner_updates=2", "learner.estimator.num_states=2"),
        ("learner.algorithm=d-treerpo", "learner.group_size=16", "learner.inner_updates=2"),
        ("model.lora={rank: 4}", "learner.inner_updates=2"),
    ],
    ids=" ".join,
)
def test_learning_flops_equal_those_that_the_learner_counts(recipe_file: Path, overrides: tuple[str, ...]) -> None:
    """For a round of one group, whose completions differ in their rewards alone."""
    recipe = _recipe(recipe_file, "learner.groups_per_round=1", *overrides)
    shape = policy_shape(recipe)
    model = make_model(shape)
    init_weights(model, 0)
    params = recipe.rollout.sampling
    num_steps = sampler_facts(params).max_denoise_steps
    group = full_group(recipe.learner.group_size, recipe.rollout.max_prompt_tokens, params.gen_length, num_steps)
    batch = replace(
        as_leaves(group, recipe.learner.branches),
        rewards=torch.arange(group.num_rows) / group.num_rows,
        correct=torch.arange(group.num_rows) % 2 == 0,
    )
    policy = ShardedPolicy(model, None, lora=recipe.model.lora)
    learner = Learner(policy, recipe.learner, sampler_facts(recipe.rollout.sampling))
    learner.update(batch, 0)
    assert learner.model_flops == pytest.approx(learning_flops(recipe, shape), rel=1e-12)


def test_the_states_of_each_completion_of_a_group_are_counted(recipe_file: Path) -> None:
    """All completions share the first canvas, which runs once. Their later states differ."""
    two, four = (
        learning_flops(recipe, policy_shape(recipe))
        for size in (2, 4)
        for recipe in [_recipe(recipe_file, "learner.inner_updates=1", f"learner.group_size={size}", EXACT)]
    )
    assert 1.8 < four / two < 2


@pytest.mark.parametrize(("name", "canvases"), [("tiny", (1 + 16 * 2) / 16), ("block", 1.0), ("sums", 1 / 16)])
def test_completions_share_equal_canvases(name: str, canvases: float) -> None:
    """tiny: three denoise steps, of which a group shares the first; block: all states in one canvas; sums: one-step
    likelihoods without prompt masks."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", [])
    assert learning_canvases(recipe, policy_shape(recipe)) == canvases


@pytest.mark.filterwarnings("ignore:block_length .* is not the 4 slots")
@pytest.mark.parametrize(
    "sampling",
    [
        (),
        ("rollout.sampling.cfg_scale=0.5",),
        ("rollout.sampling.cache=dual",),
        ("rollout.sampling.cache=prefix", "rollout.sampling.cache_refresh_steps=3"),
        ("model.block_length=64", "rollout.sampling.steps_per_block=4"),
        ("model.block_length=4", "rollout.sampling.block_length=48", "rollout.sampling.steps_per_block=3"),
    ],
    ids=" ".join,
)
def test_sampling_flops_equal_those_that_pytorch_counts(recipe_file: Path, sampling: tuple[str, ...]) -> None:
    """For one completion that fills a canvas of 192 slots, predicting every slot of a block, as on a GPU.
    Widths are multiples of 64, because that is what they are rounded up to there."""
    one = ("learner.groups_per_round=1", "learner.group_size=2", "rollout.max_prompt_tokens=64")
    blocks = ("rollout.sampling.gen_length=128", "rollout.sampling.block_length=64", "rollout.sampling.stop_ids=[]")
    recipe = _recipe(recipe_file, *one, *blocks, *sampling)
    shape, params = policy_shape(recipe), recipe.rollout.sampling
    model = make_model(shape)
    init_weights(model, 0)
    request = Request(prompt_ids=(2,) * 64, params=params, seed=1)
    sampler = Sampler(model, 0, engine=EngineConfig(static_shapes=True))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sampler.generate([request])
    assert counter.get_total_flops() == pytest.approx(sampling_flops(recipe, shape) / 2, rel=1e-12)


def test_schedules_count_as_their_mean(recipe_file: Path) -> None:
    flops = [
        sampling_flops(recipe, policy_shape(recipe))
        for schedules in ("", "[{num_denoise_steps: 4}]", "[{num_denoise_steps: 4}, {threshold: 0.9}]")
        for recipe in [_recipe(recipe_file, *([f"rollout.schedules={schedules}"] if schedules else []))]
    ]
    # 16 steps; 4 steps; and the mean of 4 and 32 (one for each slot).
    assert flops == pytest.approx([16 * flops[1] / 4, flops[1], 18 * flops[1] / 4])
