"""Attention annealing in SFT, from causal to bidirectional: the schedule, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.sft.annealing import annealing_mask
from learner.sft.config import SftConfig
from learner.sft.documents import Documents, TokenizedExample, make_documents
from learner.sft.learner import SftLearner
from learner.sft.masking import MaskedDocuments, mask_documents, masked_logps

MASK_ID, EOS_ID = 38, 39
BLOCK_LENGTH = 4


def _documents() -> Documents:
    generator = torch.Generator().manual_seed(1)
    examples = [
        TokenizedExample(
            prompt_ids=tuple(torch.randint(0, 38, (2 + index % 3,), generator=generator).tolist()),
            completion_ids=tuple(torch.randint(0, 38, (1 + 2 * index,), generator=generator).tolist()),
            num_slots=9,
        )
        for index in range(5)
    ]
    return make_documents(examples, EOS_ID, trains_padding=False)


def _masked() -> MaskedDocuments:
    documents = _documents()
    return mask_documents(documents, MASK_ID, torch.full((documents.num_rows,), 0.6), (0, 3))


def _opened(step: int = 3, width: int = 16) -> torch.Tensor:
    opened = annealing_mask(step, 10, width, seed=5)
    assert opened is not None
    return opened


def _block_causal(config: TransformerConfig, block_length: int) -> Transformer:
    fields = {"family": "sdar", "block_length": block_length, "qk_norm": True}
    model = make_model(TransformerConfig(**config.model_dump() | fields))
    init_weights(model, seed=0)
    return model


def test_the_visible_share_of_later_slots_grows_linearly() -> None:
    later = torch.ones(200, 200, dtype=torch.bool).triu(1)
    for step in range(9):
        opened = _opened(step, width=200)
        assert opened[~later].all(), "a slot sees itself and all before it"
        assert opened[later].float().mean().item() == pytest.approx((step + 1) / 10, abs=0.01)
    assert annealing_mask(9, 10, 200, seed=5) is None
    assert annealing_mask(0, 0, 200, seed=5) is None


def test_the_mask_depends_on_seed_step_and_positions_only() -> None:
    assert torch.equal(_opened(3), _opened(3, width=99)[:16, :16])
    assert (_opened(3) & ~_opened(4)).any(), "each step draws anew"
    other = annealing_mask(3, 10, 16, seed=6)
    assert other is not None
    assert not torch.equal(_opened(3), other)


def test_without_opened_slots_attention_is_causal(config: TransformerConfig) -> None:
    """With no later slot opened it is the causal policy with the same weights."""
    opened, causal = _block_causal(config, 16), _block_causal(config, 1)
    ids = torch.randint(0, 38, (3, 12), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([12, 7, 9])
    none_opened = torch.ones(16, 16, dtype=torch.bool).tril()
    with torch.no_grad():
        torch.testing.assert_close(opened(ids, lengths, annealing_mask_SS=none_opened), causal(ids, lengths))
        assert not torch.allclose(opened(ids, lengths), causal(ids, lengths), atol=1e-3)


@pytest.mark.parametrize("form", ["alone", "packed", "in blocks"])
def test_documents_are_scored_independently(config: TransformerConfig, policy: Transformer, form: str) -> None:
    """For a block-causal policy, each noisy block follows the clean ones before it."""
    masked, opened = _masked(), _opened()
    model = _block_causal(config, BLOCK_LENGTH) if form == "in blocks" else policy
    with torch.no_grad():
        found = masked_logps(model, masked, packing=form == "packed", annealing_mask_SS=opened)
        for place, (row, column) in enumerate(zip(masked.rows.tolist(), masked.columns.tolist(), strict=True)):
            ids = masked.ids[row : row + 1, : int(masked.lengths[row])].clone()
            if form == "in blocks":
                begin = column // BLOCK_LENGTH * BLOCK_LENGTH
                ids[0, :begin] = masked.clean[row, :begin]
                ids = ids[:, : begin + BLOCK_LENGTH]
            logps = model(ids, annealing_mask_SS=opened).log_softmax(-1)[0, column]
            assert found[place].item() == pytest.approx(logps[masked.targets[place]].item(), abs=1e-5)


def _trained(config: TransformerConfig, steps: range, state: object = None, **sft: int) -> tuple[dict, dict]:
    """Return the weights, and the state to resume from, after some steps starting at `state`."""
    model = make_model(config)
    init_weights(model, seed=0)
    policy = ShardedPolicy(model, None)
    settings = SftConfig(num_labels=5, num_steps=6, batch_size=4, eos_padding="ignored", **sft)  # type: ignore[arg-type]
    learner = SftLearner(policy, settings, _documents(), seed=0)
    if state is not None:
        weights, moments = state  # type: ignore[misc]
        policy.load_full_weights(weights)
        learner.load_full_state(moments)
    for step in steps:
        learner.step(step, lr=1e-2)
    return policy.full_weights(), learner.full_state()


def test_a_resumed_stage_is_bit_identical(config: TransformerConfig) -> None:
    whole, _ = _trained(config, range(6), attention_annealing_steps=5)
    first = _trained(config, range(3), attention_annealing_steps=5)
    resumed, _ = _trained(config, range(3, 6), first, attention_annealing_steps=5)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_fully_open_attention_is_bit_identical_to_no_annealing(config: TransformerConfig) -> None:
    without, _ = _trained(config, range(2))
    opened, _ = _trained(config, range(2), attention_annealing_steps=1)
    annealed, _ = _trained(config, range(2), attention_annealing_steps=6)
    assert all(torch.equal(without[name], opened[name]) for name in without)
    assert not torch.equal(without["embed.weight"], annealed["embed.weight"])


def test_rows_are_padded_during_annealing(config: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernel for packed rows supports no mask within a row."""
    expected, _ = _trained(config, range(6), attention_annealing_steps=5)
    monkeypatch.setattr(ShardedPolicy, "concatenates_rows", True)
    found, _ = _trained(config, range(6), attention_annealing_steps=5)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-3, rtol=1e-3, msg=name)
