"""Random policies of learner tests."""

from __future__ import annotations

import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights


def perturbed_policy(config: TransformerConfig) -> Transformer:
    """Make a random policy whose norms differ from 1, and whose biases from 0."""
    model = make_model(config)
    init_weights(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1)
    return model
