"""What is measured: LLaDA-8B's shape on a GPU, or a toy that shows on a CPU that all of it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import Shape
from learner.model.transformer import Transformer
from rollout.request import Request, SamplingParams

Row = dict[str, Any]
"""What was measured, under `what`; numbers with their unit in their name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of everything."""

    device: str
    shape: Shape
    prompt_tokens: int
    gen_length: int
    block_length: int
    num_steps: int
    slots: tuple[int, ...]
    """Rows that are denoised at a time."""
    concurrency: tuple[int, ...]
    """Requests that the engine has at a time."""
    rank: int
    """Of the adapter."""
    few_layers: int
    """Blocks of the network whose every weight is trained."""
    product: int
    """Rows and columns of the square product."""
    copied_bytes: int

    @property
    def canvas_tokens(self) -> int:
        """Of one completion."""
        return self.prompt_tokens + self.gen_length

    def params(self, **changes: Any) -> SamplingParams:
        """The schedule: the same number of tokens in every step."""
        values: dict[str, Any] = {
            "gen_length": self.gen_length,
            "block_length": self.block_length,
            "num_denoise_steps": self.num_steps,
            "temperature": 0.0,
            "stop_ids": (),
        }
        return SamplingParams(**values | changes)

    def requests(self, count: int, **changes: Any) -> list[Request]:
        """So many, with random prompts."""
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(2, self.shape.vocab_size, (count, self.prompt_tokens), generator=generator).tolist()
        params = self.params(**changes)
        return [Request(prompt_ids=tuple(ids), params=params, seed=seed) for seed, ids in enumerate(prompts)]


def full(device: str) -> Setting:
    """LLaDA-8B and the first d1's schedule."""
    return Setting(
        device=device,
        shape=Shape(d_model=4096, num_layers=32, num_heads=32, vocab_size=126464),
        prompt_tokens=256,
        gen_length=256,
        block_length=32,
        num_steps=128,
        slots=(1, 8, 24, 48),
        concurrency=(1, 8, 32),
        rank=128,
        few_layers=8,
        product=8192,
        copied_bytes=2 * 10**9,
    )


def tiny(device: str) -> Setting:
    """The same program in seconds."""
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


def random_policy(setting: Setting, dtype: torch.dtype, num_layers: int | None = None) -> Transformer:
    """Made where it computes, never elsewhere: normal weights, and a head that is sharper than random."""
    shape = setting.shape
    if num_layers is not None:
        shape = Shape(
            d_model=shape.d_model, num_layers=num_layers, num_heads=shape.num_heads, vocab_size=shape.vocab_size
        )
    with torch.device("meta"):
        model = Transformer(shape.config(setting.canvas_tokens)).to(dtype)
    model = model.to_empty(device=setting.device)
    generator = torch.Generator(setting.device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator) if weight.ndim == 2 else weight.fill_(1)
        assert model.head is not None, "the shape does not tie it"
        model.head.weight.mul_(4)
        model.head.weight[model.config.mask_token_id] = 0
    return model


def taken_s(setting: Setting, work: Callable[[], object], rounds: int = 3) -> float:
    """Seconds of one call by the clock, the median of some, after one that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        synchronize(setting)
        began = time.perf_counter()
        work()
        synchronize(setting)
        times.append(time.perf_counter() - began)
    return median(times)


def synchronize(setting: Setting) -> None:
    """Wait for what the device has to do."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def normal(setting: Setting, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(*shape, device=setting.device).to(dtype)
