"""What is planned of a round, and of memory, is what the learner, the sampler and PyTorch count of the real ones."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from actors.spec import sampler_facts
from deploy.capacity.arithmetic import full_group, learning_flops, sampling_flops
from deploy.capacity.memory import saved_bytes_of_token
from deploy.capacity.shape import ParameterCounts, policy_shape
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.lora_config import WHOLE, LoraConfig
from learner.model.moe.config import MoEConfig
from learner.model.networks import make_model
from learner.model.transformer import init_weights
from learner.parallel.sharding import ShardedPolicy
from rollout.config import EngineConfig
from rollout.request import Request
from rollout.sampler import Sampler

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
        ("learner.algorithm=dmpo", "learner.group_size=2"),
        ("model.lora={rank: 4}", "learner.inner_updates=2"),
    ],
    ids=" ".join,
)
def test_the_arithmetic_of_learning_is_what_the_learner_counts(recipe_file: Path, overrides: tuple[str, ...]) -> None:
    """For a round of one group, whose completions differ in their rewards alone."""
    recipe = _recipe(recipe_file, "learner.groups_per_round=1", *overrides)
    shape = policy_shape(recipe)
    model = make_model(shape)
    init_weights(model, 0)
    group = full_group(recipe)
    batch = replace(
        group, rewards=torch.arange(group.num_rows) / group.num_rows, correct=torch.arange(group.num_rows) % 2 == 0
    )
    policy = ShardedPolicy(model, None, lora=recipe.model.lora)
    learner = Learner(policy, recipe.learner, sampler_facts(recipe.rollout.sampling))
    learner.update(batch, 0)
    assert learner.model_flops == pytest.approx(learning_flops(recipe, shape), rel=1e-12)


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
def test_the_arithmetic_of_sampling_is_what_pytorch_counts(recipe_file: Path, sampling: tuple[str, ...]) -> None:
    """For one completion that fills a canvas of 192, every slot of a block predicted, as on a GPU. Widths are multiples
    of 64, as they are rounded up to there."""
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
    # 16 steps; 4; and the mean of 4 and one for each of the 32 slots.
    assert flops == pytest.approx([16 * flops[1] / 4, flops[1], 18 * flops[1] / 4])


SDAR = {"family": "sdar", "block_length": 4, "qk_norm": True, "head_width": 48}
EXPERTS = MoEConfig(num_experts=16, experts_per_token=3, expert_width=48, router="softmax")
SHARED = EXPERTS.model_copy(update={"router": "sigmoid", "shared_width": 96})


@pytest.mark.parametrize(
    "family", [{}, SDAR, SDAR | {"family": "sdar_moe", "moe": EXPERTS}, SDAR | {"family": "llada2_moe", "moe": SHARED}]
)
def test_what_a_block_keeps_of_a_token_is_what_autograd_keeps(
    config: TransformerConfig, family: dict[str, object]
) -> None:
    """Within a hundredth: of a norm it keeps a number for each token too, and attention its normaliser and mask."""
    changes = {"d_model": 128, "num_layers": 1, "num_kv_heads": 4, "mlp_hidden_size": 320}
    shape = config.model_copy(update=changes | family)
    wide = shape.model_copy(update={"num_layers": 3})
    kept = []
    for one in (shape, wide):
        model = make_model(one)
        init_weights(model, 0)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        storages: dict[int, int] = {}

        def keep(
            tensor: torch.Tensor, weights: set[int] = weights, storages: dict[int, int] = storages
        ) -> torch.Tensor:
            # Held, so that no storage takes the place of another.
            if tensor.untyped_storage().data_ptr() not in weights:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(torch.zeros(4, 64, dtype=torch.int64))
        kept.append(sum(storages.values()))
        del logits
    # The last block keeps otherwise; the two before it are like all others.
    of_mask = 4 * 64 * shape.is_block_causal
    assert (kept[1] - kept[0]) / (2 * 4 * 64) == pytest.approx(saved_bytes_of_token(shape, 4) + of_mask, rel=0.01)


@pytest.mark.parametrize("lora", [WHOLE, LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))])
def test_parameters_are_counted_as_the_policy_has_them(
    config: TransformerConfig, moe_config: TransformerConfig, lora: LoraConfig
) -> None:
    grouped = config.model_copy(update={"family": "dream", "num_layers": 3, "qkv_bias": True})
    dense = (grouped, grouped.model_copy(update={"tied_embeddings": True}), config.model_copy(update=SDAR))
    bare = moe_config.model_copy(update={"family": "sdar_moe", "moe": EXPERTS})
    for shape in (*dense, moe_config, bare):
        model = make_model(shape)
        counts = ParameterCounts.of(shape, lora)
        assert counts.policy == sum(parameter.numel() for parameter in model.parameters())
        of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
        assert counts.block == max(of_blocks)
        assert shape.moe is not None or counts.block == of_blocks[0]
        sharded = ShardedPolicy(copy.deepcopy(model), None, lora=lora)
        trained = sum(parameter.numel() for parameter in sharded.trained_parameters.values())
        assert trained == counts.trained
        assert counts.trained == (counts.adapter or counts.policy) or shape is moe_config
        of_block = [0] * shape.num_layers
        for name, matrix in sharded.adapter_on_rank_0().items():
            of_block[int(name.split(".")[1])] += matrix.numel()
        assert counts.adapter_of_block == max(of_block)
