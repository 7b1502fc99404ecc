"""The blocks of a policy, compiled: all that are alike share their graphs, however many there are.

Sizes of a batch are symbols in them: one graph serves micro-batches of any number of rows, any width and any number of
slots that are looked at. The numbers of the network (heads, widths, what adapters are scaled by) are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType

import torch
from torch import Tensor

from learner.model.transformer import Asked, Block, Places, Transformer

_MOST_GRAPHS = 128
"""One for each way in which a process may run a block: which block (under LoRA the first has an input without gradient,
the last runs on the slots that are looked at, some have experts), gradients or none, adapters or none, what is hidden,
and a single row, slot or token, which torch compiles for itself. SFT, an evaluation and two rounds of a small policy
took 16, with an adapter 19. One more than these is an error, and not the eager block, which nobody would notice."""


def compile_blocks(model: Transformer) -> None:
    """Compile the forward of each block in place, the backward pass with it.

    What wraps a block, as checkpointing and FSDP do, does so afterwards and stays as it is. Nothing is compiled before
    it is first run.
    """
    # One function for all blocks and policies of the process: of a block its graphs hold nothing.
    compiled = torch.compile(Block.forward, fullgraph=True)
    for block in model.blocks:
        block.forward = MethodType(_of_any_size(compiled), block)


def _of_any_size(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Block.forward`, without a memory, whose sizes are symbols from the first batch on."""

    def forward(block: Block, x_BLD: Tensor, places: Places, asked: Asked | None, _memory: None) -> Tensor:
        # At each call: torch 2.11 has no limit of one function, and in torch 2.13 each thread has one, autograd's too.
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
        for tensor in (x_BLD, *_tensors(places, asked)):
            # The last axis of what is real is a width of the network.
            sizes = range(tensor.ndim - tensor.is_floating_point())
            torch._dynamo.maybe_mark_dynamic(tensor, list(sizes))
        # `dynamic=True` would say the same of every number, under FSDP of the network's too.
        return compiled(block, x_BLD, places, asked, None)

    return forward


def _tensors(places: Places, asked: Asked | None) -> Iterator[Tensor]:
    yield from places.rope
    for visible in (places.visible, places.visible_to_asked):
        if visible is not None:
            assert isinstance(visible, Tensor), "FlexAttention cannot be trained through, and rows are padded"
            yield visible
    if asked is not None:
        yield from vars(asked).values()
