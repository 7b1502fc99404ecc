"""Tiny checkpoints as those of a family are published: the mask id is the tokenizer's, and in no config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.tokenizer import MASK, ChatTokenizer, make_tokenizer
from learner.model.transformer import init_weights
from tests.tiny_policy import config_of

EXPERTS = {"num_experts": 8, "experts_per_token": 3, "expert_width": 16, "router": "softmax", "is_normalised": False}
# Each family's mask token, and what of a policy is its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "illada": ("<[MASK]>", {"tied_embeddings": True}),
    "llada_moe": ("<|mask|>", {"qk_norm": True, "moe": EXPERTS}),
    "fast_dllm": ("|<MASK>|", {"qkv_bias": True, "block_length": 4, "predicts_next": True}),
}


def publish(directory: Path, family: str) -> TransformerConfig:
    """Write one of random weights, sharp enough that orders and draws matter; returns its shape."""
    mask, changes = FAMILIES[family]
    make_tokenizer(["What is 2 + 3? The answer is five."] * 5, directory / "tokenizer", 320)
    shape = config_of(ChatTokenizer(directory / "tokenizer"), max_sequence_length=96, num_layers=2)
    shape = TransformerConfig(**shape.model_dump() | {"family": family} | changes)
    model = make_model(shape)
    init_weights(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        if model.head is not None:
            model.head.weight.mul_(4.0)
    for path in (directory / "tokenizer").iterdir():
        path.write_text(path.read_text().replace(MASK, mask))
    save_checkpoint(directory / "model", shape, model.state_dict(), directory / "tokenizer")
    (directory / "model" / "manifest.json").unlink()
    path = directory / "model" / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in raw.items() if key != "mask_token_id"}))
    return shape
