"""The evidence lower bound of a text equals the mean over all masks, and is exact for one token."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from learner.likelihood import evidence_lower_bound
from learner.model.transformer import Transformer

PROMPT, TEXT = (5, 7, 9), (11, 4, 8)


def _logps(model: Transformer, masked: tuple[int, ...]) -> float:
    """Return the sum of the log-probabilities of masked tokens, by one plain forward."""
    ids = torch.tensor([[*PROMPT, *(model.config.mask_token_id if i in masked else t for i, t in enumerate(TEXT))]])
    with torch.no_grad():
        logps_LV = model(ids)[0].float().log_softmax(-1)
    return sum(float(logps_LV[len(PROMPT) + slot, TEXT[slot]]) for slot in masked)


def _over_all_masks(model: Transformer) -> float:
    """Return the mean over the number of masked slots and over all masks of that size."""
    length = len(TEXT)
    means = []
    for count in range(1, length + 1):
        found = [length / count * _logps(model, masked) for masked in combinations(range(length), count)]
        means.append(sum(found) / len(found))
    return sum(means) / length


def test_the_bound_is_the_mean_over_all_masks(policy: Transformer) -> None:
    bound = evidence_lower_bound(policy, PROMPT, TEXT, num_draws=100_000, max_rows=20_000, seed=3)
    assert bound == pytest.approx(_over_all_masks(policy), abs=0.1)


def test_one_token_is_exact_at_any_number_of_draws(policy: Transformer) -> None:
    ids = torch.tensor([[*PROMPT, policy.config.mask_token_id]])
    with torch.no_grad():
        expected = float(policy(ids)[0, -1].float().log_softmax(-1)[TEXT[0]])
    for num_draws in (1, 7):
        bound = evidence_lower_bound(policy, PROMPT, TEXT[:1], num_draws=num_draws, max_rows=4, seed=0)
        assert bound == pytest.approx(expected, abs=1e-5)


def test_the_bound_depends_on_the_seed_and_not_on_batching(policy: Transformer) -> None:
    bounds = [
        evidence_lower_bound(policy, PROMPT, TEXT, num_draws=10, max_rows=rows, seed=seed)
        for rows, seed in ((10, 1), (3, 1), (10, 2))
    ]
    assert bounds[0] == pytest.approx(bounds[1], abs=1e-5)
    assert bounds[0] != pytest.approx(bounds[2], abs=1e-5)


def test_an_empty_text_has_log_likelihood_zero(policy: Transformer) -> None:
    assert evidence_lower_bound(policy, PROMPT, (), num_draws=4, max_rows=4, seed=0) == 0.0
