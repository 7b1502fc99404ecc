"""Tiny policies with random weights, and their config for a tokenizer's vocabulary."""

from __future__ import annotations

import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.tokenizer import EOS, MASK, ChatTokenizer
from learner.model.transformer import Transformer, init_weights


def config_of(
    tokenizer: ChatTokenizer, *, max_sequence_length: int, num_layers: int = 1, mlp_hidden_size: int = 48
) -> TransformerConfig:
    """Return the config of a policy that is created in milliseconds."""
    return TransformerConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=2,
        mlp_hidden_size=mlp_hidden_size,
        max_sequence_length=max_sequence_length,
        mask_token_id=tokenizer.token_id(MASK),
        eos_token_id=tokenizer.token_id(EOS),
        pad_token_id=tokenizer.token_id(EOS),
    )


def random_policy(config: TransformerConfig) -> Transformer:
    """Create a policy with random weights, including every norm and bias."""
    model = make_model(config)
    init_weights(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model
