"""Settings of the GPU benchmark: LLaDA-8B's shape, or a tiny one for smoke tests on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import seconds
from benchmarks.models import LLADA_8B, Shape, empty_policy, make_prompts
from learner.model.transformer import Transformer
from rollout.request import Request, SamplingParams

Row = dict[str, Any]
"""A measurement: its name under `what`, and numbers with the unit in their key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of all stages."""

    device: str
    shape: Shape
    prompt_tokens: int
    gen_length: int
    block_length: int
    num_steps: int
    slots: tuple[int, ...]
    """Batch sizes of the sampler."""
    concurrency: tuple[int, ...]
    """Numbers of concurrent requests to the engine."""
    rank: int
    """Rank of the LoRA adapter."""
    few_layers: int
    """Layers of the network for full fine-tuning."""
    product: int
    """Rows and columns of the square matmul."""
    copied_bytes: int

    @property
    def canvas_tokens(self) -> int:
        """Slots of one canvas."""
        return self.prompt_tokens + self.gen_length

    def params(self, **changes: Any) -> SamplingParams:
        """Return the schedule, which commits equally many tokens in every step."""
        values: dict[str, Any] = {
            "gen_length": self.gen_length,
            "block_length": self.block_length,
            "num_denoise_steps": self.num_steps,
            "temperature": 0.0,
            "stop_ids": (),
        }
        return SamplingParams(**values | changes)

    def requests(self, count: int, **changes: Any) -> list[Request]:
        """Make `count` requests with random prompts."""
        prompts = make_prompts(count, self.prompt_tokens, self.shape.vocab_size, "cpu").tolist()
        params = self.params(**changes)
        return [Request(prompt_ids=tuple(ids), params=params, seed=seed) for seed, ids in enumerate(prompts)]

    def of_two_blocks(self) -> Setting:
        """Shorten completions to two blocks with the same canvas length: fewer steps, each of equal cost."""
        gen_length = 2 * self.block_length
        return replace(
            self,
            prompt_tokens=self.canvas_tokens - gen_length,
            gen_length=gen_length,
            num_steps=self.num_steps * gen_length // self.gen_length,
        )

    def with_layers(self, num_layers: int) -> Setting:
        """Copy the setting with another number of layers."""
        return replace(self, shape=replace(self.shape, num_layers=num_layers))


def full(device: str) -> Setting:
    """Make the setting of LLaDA-8B with the first d1's schedule."""
    return Setting(
        device=device,
        shape=LLADA_8B,
        prompt_tokens=256,
        gen_length=256,
        block_length=32,
        num_steps=128,
        slots=(1, 8, 32),
        concurrency=(1, 8),
        rank=128,
        few_layers=8,
        product=8192,
        copied_bytes=2 * 10**9,
    )


def tiny(device: str) -> Setting:
    """Make a setting that runs in seconds."""
    return Setting(
        device=device,
        shape=Shape(d_model=64, num_layers=2, num_heads=4, vocab_size=512),
        prompt_tokens=8,
        gen_length=16,
        block_length=8,
        num_steps=8,
        slots=(1, 3),
        concurrency=(1, 2),
        rank=4,
        few_layers=1,
        product=128,
        copied_bytes=10**6,
    )


def random_policy(setting: Setting, dtype: torch.dtype) -> Transformer:
    """Make a random policy directly on its device, with normal weights and a sharpened head."""
    model = empty_policy(setting.shape, setting.canvas_tokens, setting.device, dtype)
    generator = torch.Generator(setting.device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator) if weight.ndim == 2 else weight.fill_(1)
        assert model.head is not None, "the shape does not tie it"
        model.head.weight.mul_(4)
        model.head.weight[model.config.mask_token_id] = 0
    return model


def taken_s(setting: Setting, work: Callable[[], object], rounds: int = 3) -> float:
    """Time one call by `benchmarks.measure`: the median of `rounds`, after one warm-up call."""
    work()
    return median(seconds(work, setting.device) for _ in range(rounds))


def normal(setting: Setting, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Make normal random numbers on the device."""
    return torch.randn(*shape, device=setting.device).to(dtype)
