"""A tiny random DiffusionGemma checkpoint, written by transformers."""

from __future__ import annotations

from pathlib import Path

import torch

TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "num_experts": 4,
    "top_k_experts": 2,
    "sliding_window": 12,
    "max_position_embeddings": 64,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "patch_size": 16,
}


def make_renoising_checkpoint(directory: Path, vocab_size: int = 60) -> Path:
    """Write the checkpoint to a directory, without a tokenizer."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    torch.manual_seed(0)
    network = DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(text_config=TEXT | {"vocab_size": vocab_size}, vision_config=VISION, canvas_length=8)
    )
    with torch.no_grad():
        for parameter in network.parameters():
            # Sharper than at initialization, so that entropies differ.
            parameter.normal_(0.0, 0.4)
    network.save_pretrained(directory)
    return directory
