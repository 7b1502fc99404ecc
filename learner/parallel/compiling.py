"""Compilation of a policy's blocks (torch.compile): blocks that are alike share their graphs.

Batch sizes are symbolic: one graph serves micro-batches of any number of rows, any width and any number of scored
slots. The network's numbers (heads, widths, adapter scaling) are constants.

There is a graph for each way in which a process may run a block, at most `MAX_GRAPHS`. Ways differ in the block (under
LoRA the first has an input without gradient, the last runs on scored slots, some have experts), gradients, adapters,
the attention mask, and a single row, slot or token, for which torch compiles separately. SFT, an evaluation and two
rounds of a small policy took 16, with an adapter 19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType

import torch
from torch import Tensor

from learner.model.elementwise import allow_any_sizes
from learner.model.transformer import AttentionInputs, Block, Queries, Transformer


def compile_blocks(model: Transformer) -> None:
    """Compile the forward and backward of each block in place.

    Wrappers of a block, such as checkpointing and FSDP, are applied afterwards and are not compiled. Compilation takes
    place at the first run.
    """
    # One function for all blocks and policies of the process: its graphs hold no state of a block.
    compiled = torch.compile(Block.forward, fullgraph=True)
    for block in model.blocks:
        block.forward = MethodType(_with_dynamic_sizes(compiled), block)


def _with_dynamic_sizes(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `Block.forward`, without a KV cache, so that sizes are symbolic from the first batch on."""

    def forward(
        block: Block, x_BLD: Tensor, inputs: AttentionInputs, queried: Queries | None, _kv_cache: None
    ) -> Tensor:
        allow_any_sizes((x_BLD, *_tensors(inputs, queried)))
        # `dynamic=True` would make every number symbolic, under FSDP the network's too.
        return compiled(block, x_BLD, inputs, queried, None)

    return forward


def _tensors(inputs: AttentionInputs, queried: Queries | None) -> Iterator[Tensor]:
    yield from inputs.rope
    for mask in (inputs.mask, inputs.query_mask):
        if mask is not None:
            assert isinstance(mask, Tensor), "FlexAttention cannot be trained through, and rows are padded"
            yield mask
    if queried is not None:
        yield from vars(queried).values()
