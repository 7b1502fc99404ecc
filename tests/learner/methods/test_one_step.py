from dataclasses import replace

import pytest
import torch

from learner.batch import GroupedBatch
from learner.estimators import InnerUpdate, OneStepConfig, SamplerFacts, Terms, make_terms, token_logps
from learner.model.transformer import Transformer


def _terms(policy: Transformer, batch: GroupedBatch, update: int = 0, **settings: object) -> Terms:
    config = OneStepConfig(**settings)  # type: ignore[arg-type]
    return make_terms(batch, policy.config, config.corrupt(batch, InnerUpdate(update, 4), SamplerFacts()))


def _values(policy: Transformer, batch: GroupedBatch) -> torch.Tensor:
    """Return log-probabilities [B, L], 0 where no token is scored."""
    terms = _terms(policy, batch, p_mask_prompt=0.0)
    values = torch.zeros(batch.num_rows, batch.num_slots)
    with torch.no_grad():
        values[terms.rows, terms.slots] = token_logps(policy, terms.views)
    return values


def _slowly(policy: Transformer, batch: GroupedBatch) -> torch.Tensor:
    """Compute them one row and one token at a time, with nothing shared and nothing padded."""
    values = torch.zeros(batch.num_rows, batch.num_slots)
    for row in range(batch.num_rows):
        prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]]
        masked = torch.full((batch.num_slots,), policy.config.mask_token_id)
        with torch.no_grad():
            logp = policy(torch.cat([prompt, masked])[None])[0].log_softmax(-1)
        for slot in range(int(batch.completion_lengths[row])):
            values[row, slot] = logp[len(prompt) + slot, batch.completion_ids[row, slot]]
    return values


def test_the_estimate_equals_a_row_by_row_loop(policy: Transformer, grouped: GroupedBatch) -> None:
    torch.testing.assert_close(_values(policy, grouped), _slowly(policy, grouped), atol=1e-5, rtol=0)


def test_without_prompt_masks_a_group_shares_one_canvas(policy: Transformer, grouped: GroupedBatch) -> None:
    assert len(_terms(policy, grouped, p_mask_prompt=0.0).views.ids) == 3
    assert len(_terms(policy, grouped, p_mask_prompt=0.5).views.ids) > 3


def test_the_value_of_a_token_ignores_the_other_completion_tokens(policy: Transformer, grouped: GroupedBatch) -> None:
    row = grouped.select(slice(0, 1))
    row = replace(row, completion_lengths=torch.tensor([8]), completion_ids=torch.arange(8)[None])
    changed = replace(row, completion_ids=torch.tensor([[9, 1, 2, 3, 4, 5, 6, 7]]))
    before, after = _values(policy, row)[0], _values(policy, changed)[0]
    torch.testing.assert_close(before[1:], after[1:])
    assert before[0] != after[0]


def test_prompt_masks_depend_on_sample_and_update_only(policy: Transformer, grouped: GroupedBatch) -> None:
    batch = grouped.select(slice(0, 2))
    alone = _terms(policy, batch.select(slice(1, 2)), 3, p_mask_prompt=0.5).views
    together = _terms(policy, batch, 3, p_mask_prompt=0.5).views
    assert any(torch.equal(alone.ids[0], row) for row in together.ids)
    assert not _same_masks(policy, batch, 3, 2)
    assert _same_masks(policy, batch, 3, 2, prompt_mask="fixed")


def test_d1s_micro_steps_repeat_masks_within_a_group(policy: Transformer, grouped: GroupedBatch) -> None:
    """In four updates, an even-numbered group has masks 0, 2, 0, 2, an odd-numbered one 1, 3, 1, 3."""
    even, odd = grouped.select(grouped.group_index == 0), grouped.select(grouped.group_index == 1)
    for rows in (even, odd):
        assert _same_masks(policy, rows, 0, 2, prompt_mask="micro_step")
        assert _same_masks(policy, rows, 1, 3, prompt_mask="micro_step")
        assert not _same_masks(policy, rows, 0, 1, prompt_mask="micro_step")
    third = _terms(policy, odd, 3, p_mask_prompt=0.5).views
    assert torch.equal(_terms(policy, odd, 1, p_mask_prompt=0.5, prompt_mask="micro_step").views.ids, third.ids)


@pytest.mark.parametrize("p", [0.15, 0.6])
def test_prompts_are_masked_at_the_given_rate_and_completions_always(
    policy: Transformer, grouped: GroupedBatch, p: float
) -> None:
    wide = replace(grouped.select(torch.zeros(4000, dtype=torch.long)), sample_keys=torch.arange(4000))
    corruption = OneStepConfig(p_mask_prompt=p).corrupt(wide, InnerUpdate(0, 1), SamplerFacts())
    assert corruption.prompt_masked is not None
    assert abs(corruption.prompt_masked.float().mean().item() - p) < 0.02
    assert corruption.masked.all()


def _same_masks(policy: Transformer, batch: GroupedBatch, one: int, other: int, **settings: object) -> bool:
    views = [_terms(policy, batch, update, p_mask_prompt=0.5, **settings).views for update in (one, other)]
    return views[0].ids.shape == views[1].ids.shape and torch.equal(views[0].ids, views[1].ids)
