"""Planned FLOP and memory equal what the learner, the sampler and PyTorch count in real ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from actors.spec import sampler_facts
from deploy.capacity.flops import full_group, learning_flops, sampling_flops
from deploy.capacity.memory import kept_bytes, saved_bytes_of_token
from deploy.capacity.shape import ParameterCounts, policy_shape
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.moe.config import MoEConfig
from learner.model.networks import make_model
from learner.model.transformer import init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig
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
        ("learner.algorithm=opdlm", "learner.group_size=2", "learner.num_minibatches=1"),
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


def test_the_states_of_each_completion_of_a_group_are_counted(recipe_file: Path) -> None:
    """All completions share the first canvas, which runs once. Their later states differ."""
    two, four = (
        learning_flops(recipe, policy_shape(recipe))
        for size in (2, 4)
        for recipe in [_recipe(recipe_file, "learner.inner_updates=1", f"learner.group_size={size}", EXACT)]
    )
    assert 1.8 < four / two < 2


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


SDAR = {"family": "sdar", "block_length": 4, "qk_norm": True, "head_width": 48}
EXPERTS = MoEConfig(num_experts=16, experts_per_token=3, expert_width=48, router="softmax")
SHARED = EXPERTS.model_copy(update={"router": "sigmoid", "shared_width": 96})


EVERYWHERE = LoraConfig(rank=16)
FIRST_D1S = LoraConfig(rank=16, targets=("q_proj", "k_proj", "v_proj", "up_proj"))


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are allocated in its block, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()
        self.most = 0
        """Peak bytes."""

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors that existed before."""
        self._given |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def num_bytes(self) -> int:
        """Return the live bytes."""
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and (key := made.untyped_storage()._cdata) not in self._given:
                self._storages[key] = StorageWeakRef(made.untyped_storage()), made.untyped_storage().nbytes()
        self.most = max(self.most, self.num_bytes())
        return result


def _kept_and_most(shape: TransformerConfig, lora: LoraConfig, *, checkpointed: bool, tokens: int) -> tuple[int, int]:
    """Return the bytes kept after a forward of `tokens` tokens, and the peak until its backward ends."""
    model = make_model(shape)
    init_weights(model, 0)
    policy = ShardedPolicy(model, None, ShardingConfig(activation_checkpointing=checkpointed), lora=lora)
    live = Live()
    live.leave_out(policy.tensors())
    with live:
        logits = model(torch.zeros(tokens // 64, 64, dtype=torch.int64))
        kept = live.num_bytes()
        logits.sum().backward()
    return kept, live.most


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [FULL_FINE_TUNING, EVERYWHERE, FIRST_D1S], ids=["whole", "everywhere", "first d1's"])
@pytest.mark.parametrize(
    "family", [{}, SDAR, SDAR | {"family": "sdar_moe", "moe": EXPERTS}, SDAR | {"family": "llada2_moe", "moe": SHARED}]
)
def test_what_a_block_keeps_of_a_token_is_what_autograd_keeps(
    config: TransformerConfig, family: dict[str, object], lora: LoraConfig, checkpointed: bool
) -> None:
    """Within 1 %: autograd also keeps one number per token for each norm, and attention's normaliser and mask."""
    changes = {"d_model": 128, "num_layers": 1, "num_kv_heads": 4, "mlp_hidden_size": 320}
    shape, tokens = config.model_copy(update=changes | family), 256
    wide = shape.model_copy(update={"num_layers": 3})
    thin_kept, wide_kept = (
        _kept_and_most(one, lora, checkpointed=checkpointed, tokens=tokens)[0] for one in (shape, wide)
    )
    counted = 4 * shape.d_model
    if not checkpointed:
        # On a CPU, a norm also keeps the values that it divided, for its weight's gradient.
        normed = 2 * shape.d_model + shape.qk_norm * (shape.attention_width + 4 * shape.head_dim)
        counted = saved_bytes_of_token(shape, lora, 4) + 4 * normed * (not lora.rank) + 4 * 64 * shape.is_block_causal
    # The last block saves different tensors. The two added before it are like all others.
    assert (wide_kept - thin_kept) / (2 * tokens) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_most_that_an_update_has_is_what_is_counted(config: TransformerConfig, checkpointed: bool) -> None:
    changes = {"d_model": 128, "num_layers": 12, "mlp_hidden_size": 384, "vocab_size": 16}
    shape, tokens = config.model_copy(update=changes), 2048
    _, most = _kept_and_most(shape, EVERYWHERE, checkpointed=checkpointed, tokens=tokens)
    assert most == pytest.approx(kept_bytes(shape, EVERYWHERE, tokens, 4, checkpointed=checkpointed), rel=0.1)


@pytest.mark.parametrize("lora", [FULL_FINE_TUNING, LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))])
def test_parameters_are_counted_as_the_policy_has_them(
    config: TransformerConfig, moe_config: TransformerConfig, lora: LoraConfig
) -> None:
    grouped = config.model_copy(update={"family": "dream", "predicts_next": True, "num_layers": 3, "qkv_bias": True})
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
