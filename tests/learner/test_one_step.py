from dataclasses import replace

import pytest
import torch

from learner.batch import RolloutBatch
from learner.estimators import OneStep, OneStepConfig, Views, token_logps
from learner.model.transformer import Transformer


def _values(policy: Transformer, batch: RolloutBatch, p: float = 0.0, update: int = 0) -> torch.Tensor:
    estimator = OneStep(OneStepConfig(p_mask_prompt=p), policy.config)
    with torch.no_grad():
        return token_logps(policy, estimator.plan(batch, update))


def _slowly(policy: Transformer, batch: RolloutBatch) -> list[float]:
    """One row, one token at a time, with nothing shared and nothing padded."""
    values = []
    for row in range(batch.num_rows):
        prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]]
        masked = torch.full((batch.num_slots,), policy.config.mask_token_id)
        with torch.no_grad():
            logp = policy(torch.cat([prompt, masked])[None])[0].log_softmax(-1)
        slots = range(int(batch.completion_lengths[row]))
        values += [logp[len(prompt) + slot, batch.completion_ids[row, slot]].item() for slot in slots]
    return values


def test_estimate_is_that_of_a_row_by_row_loop(policy: Transformer, rollouts: RolloutBatch) -> None:
    torch.testing.assert_close(_values(policy, rollouts), torch.tensor(_slowly(policy, rollouts)), atol=1e-5, rtol=0)


def test_without_prompt_masks_a_group_is_one_canvas(policy: Transformer, rollouts: RolloutBatch) -> None:
    views = OneStep(OneStepConfig(p_mask_prompt=0.0), policy.config).plan(rollouts, 0)
    assert len(views.ids) == 3
    masked = OneStep(OneStepConfig(p_mask_prompt=0.5), policy.config).plan(rollouts, 0)
    assert len(masked.ids) > 3


def test_the_value_of_a_token_ignores_the_other_completion_tokens(policy: Transformer, rollouts: RolloutBatch) -> None:
    row = rollouts.select(slice(0, 1))
    row = replace(row, completion_lengths=torch.tensor([8]), completion_ids=torch.arange(8)[None])
    changed = replace(row, completion_ids=torch.tensor([[9, 1, 2, 3, 4, 5, 6, 7]]))
    before, after = _values(policy, row), _values(policy, changed)
    torch.testing.assert_close(before[1:], after[1:])
    assert before[0] != after[0]


def test_prompt_masks_depend_on_the_sample_and_the_update_and_nothing_else(
    policy: Transformer, rollouts: RolloutBatch
) -> None:
    estimator = OneStep(OneStepConfig(p_mask_prompt=0.5), policy.config)
    batch = rollouts.select(slice(0, 2))
    alone, together = estimator.plan(batch.select(slice(1, 2)), 3), estimator.plan(batch, 3)
    assert any(torch.equal(alone.ids[0], row) for row in together.ids)
    assert not _same(estimator.plan(batch, 3), estimator.plan(batch, 4))
    fixed = OneStep(OneStepConfig(p_mask_prompt=0.5, prompt_mask="fixed"), policy.config)
    assert _same(fixed.plan(batch, 3), fixed.plan(batch, 4))


@pytest.mark.parametrize("p", [0.15, 0.6])
def test_prompts_are_masked_as_often_as_asked_and_completions_always(
    policy: Transformer, rollouts: RolloutBatch, p: float
) -> None:
    mask_id = policy.config.mask_token_id
    wide = replace(
        rollouts.select(torch.zeros(4000, dtype=torch.long)),
        sample_keys=torch.arange(4000),
        completion_lengths=torch.full((4000,), 8),
    )
    views = OneStep(OneStepConfig(p_mask_prompt=p), policy.config).plan(wide, 0)
    rows = views.slots[views.scored].view(4000, 8)[:, 0] // views.ids.shape[1]
    masked = views.ids[rows] == mask_id
    assert abs(masked[:, :6].float().mean().item() - p) < 0.02
    assert masked[:, 6:].all()


def _same(one: Views, other: Views) -> bool:
    return one.ids.shape == other.ids.shape and torch.equal(one.ids, other.ids)
