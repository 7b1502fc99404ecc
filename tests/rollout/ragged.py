"""A block-causal policy, and requests with prompts of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout.request import Request, SamplingParams


def sharp_policy(config: TransformerConfig, sharpness: float, *, predicts_next: bool = False) -> Transformer:
    """Return a policy of SDAR's architecture with blocks of four. Random networks are almost uniform; sharper logits
    make the commit order and the samples depend on the policy."""
    changes = {"family": "sdar", "block_length": 4, "qk_norm": True, "head_width": 12}
    shape = TransformerConfig(**config.model_dump() | changes)
    model = make_model(shape.model_copy(update={"predicts_next": predicts_next}))
    init_weights(model, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(sharpness)
    return model


def ragged_requests(params: SamplingParams, lengths: Sequence[int]) -> list[Request]:
    """Return one request for each prompt length."""
    generator = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(0, 38, (length,), generator=generator).tolist()) for length in lengths]
    return [Request(prompt_ids=prompt, params=params, seed=100 + i) for i, prompt in enumerate(prompts)]
