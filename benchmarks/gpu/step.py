"""GPU operation counts of one denoise step of LLaDA-8B's shape, on a CPU with meta tensors.

    python -m benchmarks.gpu.step [--slots 48] [--temperature 0.9]

The sampler follows its eager GPU code paths in bfloat16, on torch's meta device (tensors without values). The table has
rows for prompts of equal length, of unequal lengths, and for a dual cache: plain, and with fused elementwise functions
(`rollout.engine.compile=elementwise`), each counted as one kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.counting import OpCounter, count_as_fused
from benchmarks.gpu.setting import Row, Setting, full
from benchmarks.models import empty_policy
from learner.model.attention import varlen
from rollout import sampler
from rollout.config import EngineConfig
from rollout.request import Request
from rollout.sampler import Sampler

_COLUMNS = {
    "what": "one step",
    "launches": "launches",
    "waits": "waits",
    "gigabytes": "GB, but for products and attention",
    "masked": "attention with a mask, of",
    "attention": "all",
}
# Prompts of unequal length are up to this many tokens, less one, shorter.
_RAGGED = 40


class _WithoutValues(TorchFunctionMode):
    """Supplies values where the host reads a meta tensor, and counts fused attention as one kernel."""

    def __init__(self, counter: OpCounter, requests: list[Request]) -> None:
        super().__init__()
        self._counter = counter
        # The values that the sampler reads for new rows: done, steps, block, first equal canvas, broken.
        self._looked = [[0, 1, len(request.prompt_ids), slot, 0] for slot, request in enumerate(requests)]
        self.num_masked = self.num_attention = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.num_masked += kwargs["attn_mask"] is not None
            return self.attend(args[0])
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.tolist and args[0].is_meta:
            self._counter.num_waits += 1
            return self._looked
        return func(*args, **kwargs)

    def attend(self, queries: Tensor) -> Tensor:
        """Return an attention output of the right shape, and count the kernel."""
        self.num_attention += 1
        self._counter.num_launches += 1
        return torch.empty_like(queries)


def count_step(
    setting: Setting, requests: list[Request], dtype: torch.dtype = torch.bfloat16, *, is_fused: bool = False
) -> Row:
    """Count the operations of one denoise step, after the step that admits the requests."""
    model = empty_policy(setting.shape, setting.canvas_tokens, "meta", dtype)
    counter = OpCounter()
    if is_fused:
        count_as_fused(model, counter)
    # There is no GPU to query, so assume that the kernel for rows of unequal length is available.
    with patch.object(sampler, "has_kernel", lambda *_: True):
        batch = Sampler(model, 0, EngineConfig(num_slots=len(requests), static_shapes=True)).open(requests)
    with (
        _WithoutValues(counter, requests) as answers,
        patch.object(varlen, "has_kernel", lambda *_: True),
        patch("torch.nn.attention.varlen.varlen_attn", lambda queries, *_, **__: answers.attend(queries)),
        counter,
    ):
        batch.step()
        counter.reset()
        answers.num_masked = answers.num_attention = 0
        batch.step()
    return {
        "launches": counter.num_launches,
        "waits": counter.num_waits,
        "gigabytes": counter.num_bytes / 1e9,
        "masked": answers.num_masked,
        "attention": answers.num_attention,
    }


def rows(setting: Setting, slots: int, **changes: Any) -> list[Row]:
    """Build the table: `slots` rows of equal length, of unequal length, and with a dual cache; plain and fused."""
    equal = setting.requests(slots, **changes)
    ragged = [replace(one, prompt_ids=one.prompt_ids[row % _RAGGED :]) for row, one in enumerate(equal)]
    cached = setting.requests(slots, cache="dual", **changes)
    cases = {
        f"{slots} rows of {setting.canvas_tokens}": equal,
        f"{slots} rows, up to {_RAGGED - 1} shorter": ragged,
        f"{slots} rows, dual cache": cached,
    }
    return [
        {"what": what + ", fused" * is_fused, **count_step(setting, requests, is_fused=is_fused)}
        for what, requests in cases.items()
        for is_fused in (False, True)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.9)
    args = parser.parse_args()
    table = Table(title=f"LLaDA-8B's shape in bfloat16, temperature {args.temperature:g}")
    for heading in _COLUMNS.values():
        table.add_column(heading)
    for row in rows(full("meta"), args.slots, temperature=args.temperature):
        table.add_row(*(f"{row[key]:.1f}" if key == "gigabytes" else str(row[key]) for key in _COLUMNS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
