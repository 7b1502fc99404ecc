from __future__ import annotations

import pytest

from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer
from tests.learner.policies import perturbed_policy


@pytest.fixture(params=["llada", "dream"])
def base(request: pytest.FixtureRequest, config: TransformerConfig) -> Transformer:
    """A random policy; Dream's has nonzero biases."""
    is_dream = request.param == "dream"
    changes = {"family": request.param, "qkv_bias": is_dream, "predicts_next": is_dream}
    return perturbed_policy(config.model_copy(update=changes))
