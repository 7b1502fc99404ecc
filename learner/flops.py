"""Model FLOP of forwards and updates, as MFU (model FLOP utilisation) counts them.

Two FLOP for each multiply-add of a linear layer, of attention and of the head. Norms, softmaxes and the optimizer's
step are not counted, nor is recomputation (activation checkpointing, the first of two sweeps). The count is of the
model, not of the program (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.estimators import Views
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasSums:
    """Sizes of canvases that determine their FLOP, summed over all of them."""

    tokens: int
    """Slots without padding."""
    pairs: int
    """Pairs of slots that attend to each other: squared lengths."""
    queries: int
    """Queries of the last block's attention."""
    query_pairs: int
    """Pairs of such a query and a slot that it attends to."""
    scored: int
    """Slots that the last feed-forward and the head run on."""

    @classmethod
    def of(cls, views: Views) -> CanvasSums:
        """Sum up views, whose last block runs only on scored slots. In rows of blocks, masked pairs are counted too."""
        queries_V = (views.slots // views.ids.shape[1]).bincount(minlength=len(views.ids))
        sums = torch.stack((views.lengths, views.lengths**2, queries_V, queries_V * views.lengths), dim=1).sum(dim=0)
        tokens, pairs, queries, query_pairs = sums.tolist()
        return cls(tokens=tokens, pairs=pairs, queries=queries, query_pairs=query_pairs, scored=queries)


NO_CANVASES = CanvasSums(tokens=0, pairs=0, queries=0, query_pairs=0, scored=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOP of one forward, split by the cost of the backward pass."""

    layers: float
    """The blocks' linear layers; of the experts, those that a token is routed to."""
    attention: float
    """Attention scores, and their weighted sums of values."""
    head: float
    """The output layer."""
    adapter: float
    """LoRA's matrices."""

    @property
    def total(self) -> float:
        """All parts."""
        return self.body + self.head + self.adapter

    @property
    def body(self) -> float:
        """The blocks, without an adapter."""
        return self.layers + self.attention


def forward_flops(config: TransformerConfig, lora: LoraConfig, canvases: CanvasSums) -> Flops:
    """Count the FLOP of a forward of canvases through a policy."""
    layers = adapter = 0.0
    in_last_block = _slots_of_last_block(canvases)
    for layer in range(config.num_layers):
        is_last, moe = layer == config.num_layers - 1, config.experts_of(layer)
        for name, (inputs, outputs) in config.linear_layers(layer).items():
            rows = in_last_block[name] if is_last else canvases.tokens
            layers += 2.0 * inputs * outputs * rows
            adapter += 2.0 * lora.rank * (inputs + outputs) * rows * (name in lora.targets)
        if moe is not None:
            layers += (
                2.0 * moe.multiply_adds_per_token(config.d_model) * (canvases.scored if is_last else canvases.tokens)
            )
    pairs = (config.num_layers - 1) * canvases.pairs + canvases.query_pairs
    return Flops(
        layers=layers,
        attention=2.0 * 2 * config.attention_width * pairs,
        head=2.0 * config.d_model * config.vocab_size * canvases.scored,
        adapter=adapter,
    )


def update_flops(
    config: TransformerConfig, lora: LoraConfig, canvases: CanvasSums, *, recomputes: bool = False
) -> float:
    """Count the FLOP of a forward of canvases and its backward; `recomputes` adds a second forward of the blocks.

    A backward is twice its forward: the gradients of a layer's input and of its weight. Under LoRA frozen weights have
    no gradient. The first block's input gradients are counted, although nothing below it is trained.
    """
    forward = forward_flops(config, lora, canvases)
    frozen = 2 if lora.rank else 3
    update = frozen * (forward.layers + forward.head) + 3 * (forward.attention + forward.adapter)
    return update + recomputes * (forward.body + forward.adapter)


def _slots_of_last_block(canvases: CanvasSums) -> dict[str, int]:
    """Return the number of slots that each linear layer of the last block runs on."""
    of_keys = dict.fromkeys(("k_proj", "v_proj"), canvases.tokens)
    after_attention = dict.fromkeys(("out_proj", "gate_proj", "up_proj", "down_proj"), canvases.scored)
    return {"q_proj": canvases.queries, **of_keys, **after_attention}
