"""The shape of tiny policies whose vocabulary is a tokenizer's."""

from __future__ import annotations

from learner.model.config import TransformerConfig
from learner.model.tokenizer import EOS, MASK, ChatTokenizer


def config_of(
    tokenizer: ChatTokenizer, *, max_sequence_length: int, num_layers: int = 1, mlp_hidden_size: int = 48
) -> TransformerConfig:
    """Of a policy that is made in milliseconds."""
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
