"""GPU operation counts of one learner sweep of LLaDA-8B's shape, on a CPU with meta tensors.

    python -m benchmarks.gpu.update [--tokens 16384 65536] [--groups 32] [--group 8]

It compares rows of unequal length padded (with a mask), concatenated, and concatenated with fused elementwise functions
(`sharding.compile=elementwise`), each counted as one kernel. It counts forward and backward of every micro-batch on
torch's meta device (tensors without values): eager, bfloat16, all weights trained. Prompt lengths have GSM8K's
distribution.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks import rounds
from benchmarks.gpu.counting import OpCounter, count_as_fused
from benchmarks.gpu.setting import Row
from benchmarks.models import LLADA_8B, Shape, empty_policy
from learner.estimators import Terms, token_logps
from learner.model.attention import varlen
from learner.model.transformer import Transformer
from learner.parallel.micro_batches import make_micro_batches

_COLUMNS = {
    "what": "one sweep",
    "micro_batches": "micro-batches",
    "slots": "slots run",
    "padding": "of them padding",
    "launches": "launches",
    "waits": "waits",
    "gigabytes": "GB, but for products and attention",
    "masked": "attention with a mask, of",
    "attention": "all",
}


class _Attention(torch.autograd.Function):
    """Stand-in for fused attention: one kernel in the forward, one in the backward."""

    @staticmethod
    def forward(ctx: Any, counter: OpCounter, *tensors: Tensor) -> Tensor:
        ctx.counter = counter
        ctx.save_for_backward(*tensors)
        counter.num_launches += 1
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        ctx.counter.num_launches += 1
        return None, *map(torch.empty_like, ctx.saved_tensors)


class _WithoutValues(TorchFunctionMode):
    """Counts fused attention as one kernel, and how often it has a mask."""

    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self._counter = counter
        self.num_masked = self.num_attention = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.num_masked += kwargs.get("attn_mask") is not None
            return self.attend(*args)
        return args[0] if func is Tensor.pin_memory else func(*args, **kwargs)

    def attend(self, *tensors: Tensor) -> Tensor:
        """Return an attention output of the right shape, and count the kernel."""
        self.num_attention += 1
        attended: Tensor = _Attention.apply(self._counter, *tensors)
        return attended


def count_sweep(
    model: Transformer, terms: Terms, max_tokens: int, *, concatenates_rows: bool, is_fused: bool = False
) -> Row:
    """Count the operations of forward and backward over the micro-batches of these terms.

    `is_fused`: with fused elementwise functions; the model then stays so.
    """
    micros = make_micro_batches(terms, terms.rows, max_tokens, concatenates_rows=concatenates_rows).terms
    counter = OpCounter()
    if is_fused:
        count_as_fused(model, counter)
    # There is no GPU to query, so assume that the kernel is available.
    with (
        _WithoutValues(counter) as answers,
        patch.object(varlen, "has_kernel", lambda *_: True),
        patch("torch.nn.attention.varlen.varlen_attn", lambda *args, **_: answers.attend(*args[:3])),
        counter,
    ):
        for micro in micros:
            token_logps(model, micro.views, micro.distribution).sum().backward()
    tokens = sum(int(micro.views.lengths.sum()) for micro in micros)
    slots = tokens if concatenates_rows else sum(micro.views.ids.numel() for micro in micros)
    return {
        "what": f"at most {max_tokens:,} tokens, {'back to back' if concatenates_rows else 'padded'}"
        + ", fused" * is_fused,
        "micro_batches": len(micros),
        "slots": slots,
        "padding": 1 - tokens / slots,
        "launches": counter.num_launches,
        "waits": counter.num_waits,
        "gigabytes": counter.num_bytes / 1e9,
        "masked": answers.num_masked,
        "attention": answers.num_attention,
    }


def rows(setting: rounds.Setting, budgets: list[int]) -> list[Row]:
    """Build the table: the same canvases padded, concatenated, and with fused functions, by micro-batch size."""
    plain, fused = (empty_policy(setting.shape, setting.canvas_tokens, "meta", torch.bfloat16) for _ in range(2))
    terms = rounds.ragged_terms(setting, plain.config)
    return [
        row
        for most in budgets
        for row in (
            count_sweep(plain, terms, most, concatenates_rows=False),
            count_sweep(plain, terms, most, concatenates_rows=True),
            count_sweep(fused, terms, most, concatenates_rows=True, is_fused=True),
        )
    ]


def setting_of(shape: Shape, num_groups: int, group_size: int) -> rounds.Setting:
    """Make a setting with canvases of at most 512 columns, of which the last 256 are denoised."""
    return rounds.Setting(
        shape=shape, prompt_tokens=256, gen_length=256, num_groups=num_groups, group_size=group_size, num_updates=1
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536], help="of a micro-batch, at most")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="completions of a problem")
    args = parser.parse_args()
    table = Table(title=f"LLaDA-8B's shape in bfloat16, {args.groups} groups of {args.group}")
    for heading in _COLUMNS.values():
        table.add_column(heading)
    for row in rows(setting_of(LLADA_8B, args.groups, args.group), args.tokens):
        shown = {"gigabytes": f"{row['gigabytes']:.1f}", "padding": f"{row['padding']:.1%}"}
        table.add_row(*(str(shown.get(key, row[key])) for key in _COLUMNS))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
