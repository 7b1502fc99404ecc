"""The arithmetic of forwards and updates, counted from their products: what a share of a device's speed is taken of.

Two FLOP for each multiply-add of a linear layer, of attention and of the head. Norms, softmaxes and the optimizer's
step do not count, nor does what is computed twice (activation checkpointing, the first of two sweeps): the count is
that of the model, as in MFU (PaLM, arXiv 2204.02311, appendix B), and not of a program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.estimators import Views
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasSums:
    """How much some canvases are: sums over all of them."""

    tokens: int
    """Slots, padding not included."""
    pairs: int
    """Pairs of slots that look at each other: squares of lengths."""
    asked: int
    """Slots that the last block's attention runs on."""
    asked_pairs: int
    """Pairs of such a slot and one that it looks at."""
    scored: int
    """Slots that the last feed-forward and the head run on."""

    @classmethod
    def of(cls, views: Views) -> CanvasSums:
        """Those of some views, of which the last block sees what is scored alone. In rows of blocks, pairs that are
        hidden from each other are counted as well."""
        asked_V = (views.slots // views.ids.shape[1]).bincount(minlength=len(views.ids))
        sums = torch.stack((views.lengths, views.lengths**2, asked_V, asked_V * views.lengths), dim=1).sum(dim=0)
        tokens, pairs, asked, asked_pairs = sums.tolist()
        return cls(tokens=tokens, pairs=pairs, asked=asked, asked_pairs=asked_pairs, scored=asked)


NOTHING = CanvasSums(tokens=0, pairs=0, asked=0, asked_pairs=0, scored=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOP of one forward, by what a backward pass costs."""

    layers: float
    """The blocks' linear layers: of experts, those that a token takes."""
    attention: float
    """Scores, and what is gathered by them."""
    head: float
    """The output layer."""
    adapter: float
    """LoRA's matrices."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.body + self.head + self.adapter

    @property
    def body(self) -> float:
        """The blocks, without an adapter."""
        return self.layers + self.attention


def forward_flops(config: TransformerConfig, lora: LoraConfig, canvases: CanvasSums) -> Flops:
    """FLOP of a forward of some canvases through a policy."""
    layers = adapter = 0.0
    in_last_block = _slots_of_last_block(canvases)
    for layer in range(config.num_layers):
        is_last, moe = layer == config.num_layers - 1, config.experts_of(layer)
        for name, (inputs, outputs) in config.linear_layers(layer).items():
            rows = in_last_block[name] if is_last else canvases.tokens
            layers += 2.0 * inputs * outputs * rows
            adapter += 2.0 * lora.rank * (inputs + outputs) * rows * (name in lora.targets)
        if moe is not None:
            layers += 2.0 * moe.products_of_token(config.d_model) * (canvases.scored if is_last else canvases.tokens)
    pairs = (config.num_layers - 1) * canvases.pairs + canvases.asked_pairs
    return Flops(
        layers=layers,
        attention=2.0 * 2 * config.attention_width * pairs,
        head=2.0 * config.d_model * config.vocab_size * canvases.scored,
        adapter=adapter,
    )


def update_flops(config: TransformerConfig, lora: LoraConfig, canvases: CanvasSums) -> float:
    """FLOP of a forward of some canvases and its backward.

    A backward is twice its forward: the derivative by a layer's input, and the one by its weight. Under LoRA the frozen
    weights have none; that nothing is trained below the first block, which could spare it some, is not taken off.
    """
    forward = forward_flops(config, lora, canvases)
    frozen = 2 if lora.rank else 3
    return frozen * (forward.layers + forward.head) + 3 * (forward.attention + forward.adapter)


def _slots_of_last_block(canvases: CanvasSums) -> dict[str, int]:
    """The slots that each linear layer of the last block runs on."""
    of_keys = dict.fromkeys(("k_proj", "v_proj"), canvases.tokens)
    after_attention = dict.fromkeys(("out_proj", "gate_proj", "up_proj", "down_proj"), canvases.scored)
    return {"q_proj": canvases.asked, **of_keys, **after_attention}
