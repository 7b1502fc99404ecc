"""Token sampling: the distribution is softmax(logits / T), with the requested truncation."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.counter import uniform
from rollout.token_sampling import SamplingDistribution, inverse_cdf, predictions, sample_tokens, truncate

_DRAWS = 40_000


def _draw(
    logits_V: Tensor, temperature: float, count: int, *, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    distribution = SamplingDistribution(
        temperature=torch.full((count,), temperature),
        top_p=torch.full((count,), top_p),
        top_k=torch.full((count,), top_k),
        is_truncated=top_p < 1 or top_k > 0,
    )
    predicted = predictions(logits_V[None].clone())
    drawn = sample_tokens(
        predicted, torch.zeros(count, dtype=torch.int64), distribution, uniform(torch.tensor(1), torch.arange(count))
    )
    return drawn.tokens, drawn.logp


def _chi_square(tokens_N: Tensor, law_V: Tensor) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom. Cells with fewer than 10 expected samples are merged
    into one."""
    counts, expected = torch.bincount(tokens_N, minlength=len(law_V)).double(), len(tokens_N) * law_V.double()
    is_cell = expected >= 10
    pairs = [(counts[is_cell], expected[is_cell])]
    if expected[~is_cell].sum() >= 10:
        pairs.append((counts[~is_cell].sum()[None], expected[~is_cell].sum()[None]))
    observed, wanted = (torch.cat(column) for column in zip(*pairs, strict=True))
    return ((observed - wanted) ** 2 / wanted).sum().item(), len(wanted) - 1


@pytest.mark.parametrize("temperature", [0.3, 0.9, 1.0, 2.5])
@pytest.mark.parametrize("vocab_size", [5, 64, 1000])
def test_draws_follow_softmax(temperature: float, vocab_size: int) -> None:
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[1] = -torch.inf
    tokens, logps = _draw(logits, temperature, _DRAWS)
    distribution = (logits.double() / temperature).softmax(-1)
    statistic, freedom = _chi_square(tokens, distribution)
    # Wilson-Hilferty approximation: 3.7 standard deviations, p = 0.0001.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.7 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
    assert (tokens != 1).all()
    torch.testing.assert_close(logps, distribution.log()[tokens].float(), atol=1e-5, rtol=0)


def test_tokens_at_the_tail_of_a_large_vocabulary_are_drawn() -> None:
    """A Zipf distribution over LLaDA's vocabulary: with bfloat16 noise, ranks above about a hundred are never
    sampled."""
    ranks = torch.arange(1, 126_465, dtype=torch.float64)
    distribution = ranks.reciprocal() / ranks.reciprocal().sum()
    tokens, _ = _draw(distribution.log().float(), 1.0, 1_500)
    edges = [0, 1, 10, 100, 1_000, 10_000, 126_464]
    for low, high in pairwise(edges):
        p = distribution[low:high].sum().item()
        share = ((tokens >= low) & (tokens < high)).double().mean().item()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 1_500), (low, high)


def test_top_k_and_top_p_keep_the_most_probable_and_renormalise() -> None:
    logits = torch.tensor([0.5, 0.2, 0.1, 0.15, 0.05]).log()
    for kwargs, kept in (
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 3}),
        ({"top_p": 0.8, "top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
    ):
        tokens, logps = _draw(logits, 1.0, 4_000, **kwargs)
        assert set(tokens.tolist()) == kept, kwargs
        distribution = torch.where(torch.tensor([v in kept for v in range(5)]), logits.exp(), 0.0)
        torch.testing.assert_close(logps, (distribution / distribution.sum()).log()[tokens], atol=1e-5, rtol=0)


def test_each_slot_has_its_own_truncation() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    kept = truncate(logits, torch.tensor([1.0, 1.0, 0.3]), torch.tensor([0, 4, 0])).isfinite()
    assert kept[0].all()
    assert kept[1].sum() == 4
    assert 1 <= kept[2].sum() < 50


def test_temperature_0_takes_the_lowest_id_of_the_most_probable() -> None:
    tokens, logps = _draw(torch.tensor([1.0, 3.0, 3.0, -1.0]), 0.0, 5)
    assert tokens.tolist() == [1] * 5
    assert logps.tolist() == [0.0] * 5


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 0.5, 1.0, 3.0]), min_size=1, max_size=200),
    uniform_draw=st.floats(1e-7, 1 - 1e-7),
)
def test_a_token_of_zero_probability_is_never_drawn(weights: list[float], uniform_draw: float) -> None:
    row = torch.tensor([weights])
    if row.sum() == 0:
        return
    tokens, totals = inverse_cdf(row, torch.tensor([uniform_draw]))
    assert row[0, tokens[0]] > 0
    assert totals[0].item() == pytest.approx(row.double().sum().item(), rel=1e-5)


def test_the_statistics_equal_those_of_log_softmax() -> None:
    logits = 3 * torch.randn(7, 33, generator=torch.Generator().manual_seed(2))
    logits[:, 4] = -torch.inf
    logp = logits.log_softmax(-1)
    predicted, slots = predictions(logits.clone()), torch.arange(7)
    torch.testing.assert_close(-predicted.log_norm, logp.amax(-1))
    assert torch.equal(predicted.top_tokens(slots), logits.argmax(-1))
    torch.testing.assert_close(predicted.logp(slots, torch.full((7,), 9)), logp[:, 9])
    torch.testing.assert_close(predicted.entropy(slots), torch.special.entr(logp.exp()).sum(-1))
