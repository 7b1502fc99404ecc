"""Capacity plans are within 10 % of measurements on one H200 (docs/benchmarks.md, one GPU)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import models
from deploy.capacity.flops import completion_s, learning_s, publishing_s
from deploy.capacity.gpus import GPU_KINDS
from deploy.capacity.memory import learner_memory
from deploy.capacity.shape import policy_shape
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from learner.model.families.llada import write_config
from learner.model.lora_config import TARGETS
from learner.planning.sizes import ParameterCounts

RECIPE = Path(__file__).parents[3] / "recipes" / "llada-gsm8k.yaml"
H200 = GPU_KINDS["H200"]
ADAPTER, EVERY_WEIGHT = (32, 128), (8, 0)
# What `benchmarks/gpu` samples: its blocks and steps cost as much as those of a shorter completion.
SAMPLE = (
    "rollout.max_prompt_tokens=256",
    "rollout.sampling={gen_length: 256, block_length: 32, num_denoise_steps: 128, temperature: 0}",
)
# What `benchmarks/gpu/learning.py` trains: two updates of 32 canvases of 512 slots, without FSDP.
UPDATE = (
    "rollout.num_samplers=1",
    "rollout.batch_size=32",
    "learner.num_workers=1",
    "learner.groups_per_round=4",
    "learner.group_size=8",
    "learner.inner_updates=2",
    "learner.micro_batch_tokens=4096",
    "learner.estimator={name: one_step, p_mask_prompt: 0.15, prompt_mask: each_update}",
    "sharding={compute_dtype: bfloat16, activation_checkpointing: false}",
)


@pytest.fixture
def llada(tmp_path: Path) -> Callable[..., Recipe]:
    """The recipe for LLaDA-8B, or for a shape of fewer layers, with or without an adapter."""

    def made(num_layers: int, rank: int, *overrides: str) -> Recipe:
        shape = models.LLADA_8B.config(4096).model_copy(update={"num_layers": num_layers})
        (tmp_path / "config.json").write_text(json.dumps(write_config(shape)))
        lora = f"{{rank: {rank}, targets: [{', '.join(TARGETS)}], base_weights: full}}"
        given = (f"model.checkpoint={tmp_path}", "device=cuda", f"model.lora={lora}", "sft.num_steps=0")
        return load_recipe(RECIPE, [*given, *SAMPLE, *overrides])

    return made


@pytest.mark.parametrize(
    ("slots", "cache", "is_compiled", "measured"),
    [
        (1, "none", False, 95),
        (8, "none", False, 155),
        (32, "none", False, 155),
        (1, "none", True, 136),
        (8, "none", True, 174),
        (32, "none", True, 172),
        (1, "dual", False, 110),
        (32, "dual", False, 1093),
        (1, "dual", True, 191),
        (8, "dual", True, 830),
        (32, "dual", True, 1060),
    ],
)
def test_sampler_throughput_equals_the_measured_one(
    llada: Callable[..., Recipe], slots: int, cache: str, is_compiled: bool, measured: float
) -> None:
    """Without an adapter, whose cost on a GPU has not been measured."""
    engine = f"rollout.engine={{num_slots: {slots}, dtype: bfloat16, compile: {str(is_compiled).lower()}}}"
    recipe = llada(32, 0, engine, f"rollout.sampling.cache={cache}")
    params = recipe.rollout.sampling
    seconds = completion_s(recipe, policy_shape(recipe), H200, params, slots)
    assert params.gen_length / seconds == pytest.approx(measured, rel=0.1)


def test_sampler_throughput_when_bound_by_kernel_launches(llada: Callable[..., Recipe]) -> None:
    """Host-bound: eager, with a KV cache, 8 rows. Measured 437 to 700, depending on the time and the machine."""
    recipe = llada(32, 0, "rollout.sampling.cache=dual")
    assert 437 < 256 / completion_s(recipe, policy_shape(recipe), H200, recipe.rollout.sampling, 8) < 700


@pytest.mark.parametrize(
    ("trained", "is_compiled", "measured"),
    [(ADAPTER, False, 3.67), (ADAPTER, True, 3.18), (EVERY_WEIGHT, False, 1.15), (EVERY_WEIGHT, True, 1.02)],
)
def test_seconds_of_updates(
    llada: Callable[..., Recipe], trained: tuple[int, int], is_compiled: bool, measured: float
) -> None:
    recipe = llada(*trained, *UPDATE, f"sharding.compile={str(is_compiled).lower()}")
    assert learning_s(recipe, policy_shape(recipe), H200) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("trained", "measured"), [(ADAPTER, 44.0), (ADAPTER, 41.5), (EVERY_WEIGHT, 35.1), (EVERY_WEIGHT, 34.3)]
)
def test_the_peak_of_updates(llada: Callable[..., Recipe], trained: tuple[int, int], measured: float) -> None:
    """Eager, and compiled. Measured without FSDP and as PyTorch counts: no gathered blocks, no overhead of CUDA.

    Where all weights are trained, they and their optimizer state were in bfloat16, and the head's gradient of a
    micro-batch existed in addition to the accumulated one.
    """
    recipe = llada(*trained, *UPDATE)
    shape = policy_shape(recipe)
    parts = {part.name: part.num_bytes for part in learner_memory(recipe, shape, 1).parts}
    del parts["CUDA and NCCL"], parts["gathered blocks, embedding and head"]
    if trained == EVERY_WEIGHT:
        for name in ("weights in float32", "gradient and AdamW's moments"):
            parts[name] /= 2
        parts["gradient of the head"] = 2 * shape.vocab_size * shape.d_model
    assert sum(parts.values()) / 1e9 == pytest.approx(measured, rel=0.1)


def test_seconds_to_publish_an_adapter(llada: Callable[..., Recipe]) -> None:
    recipe = llada(*ADAPTER)
    shape = policy_shape(recipe)
    assert 4 * ParameterCounts.of(shape, recipe.model.lora).adapter == pytest.approx(1.342e9, rel=1e-3)
    assert publishing_s(recipe, shape) == pytest.approx(1.02 + 0.40, rel=0.01)
