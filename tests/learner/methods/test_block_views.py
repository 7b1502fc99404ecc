"""Views of block-causal policies against one forward per canvas, and the original code's records."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learner.batch import GroupedBatch
from learner.estimators import InnerUpdate, SamplerFacts, TrajectoryConfig, make_terms, token_logps
from learner.estimators.block_views import views_of_blocks
from learner.estimators.terms import Corruption
from learner.likelihood import evidence_lower_bound
from learner.model.checkpoint import load_policy
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.targets import PADDING
from learner.model.transformer import Transformer, init_weights
from learner.parallel.micro_batches import make_micro_batches
from learner.sft.masking import MaskedDocuments, masked_logps
from tests.learner.batches import batch_of

BLOCK, MASK = 4, 38
FIRST = InnerUpdate(0, 1)


@pytest.fixture(params=[False, True], ids=["at the slot", "at the slot before"])
def policy(request: pytest.FixtureRequest, config: TransformerConfig) -> Transformer:
    changes = {"family": "sdar", "block_length": BLOCK, "qk_norm": True, "predicts_next": request.param}
    model = make_model(config.model_copy(update=changes))
    init_weights(model, seed=0)
    return model


def _batch(num_rows: int = 8, num_slots: int = 13) -> GroupedBatch:
    generator = torch.Generator().manual_seed(7)
    completions = torch.randint(0, 30, (num_rows, num_slots), generator=generator)
    slots = torch.arange(num_slots)
    return GroupedBatch.of(
        batch_of(
            prompts=torch.randint(0, 30, (num_rows, 6), generator=generator),
            completions=completions,
            lengths=torch.full((num_rows,), num_slots),
            # Blocks are denoised from left to right from column 8 on: two slots after the prompt, then four each.
            steps=(slots + 2) // BLOCK * 10 + (slots + torch.arange(num_rows)[:, None]) % 3,
            rewards=torch.rand(num_rows, generator=generator),
        )
    )


def _alone(policy: Transformer, canvas: Tensor, clean: Tensor, column: int, token: int) -> Tensor:
    """Return the log-probability of one token, by a forward of the clean columns before its block and its block's
    canvas."""
    begin = column // BLOCK * BLOCK
    ids = torch.cat((clean[:begin], canvas[begin : begin + BLOCK]))[None]
    return policy(ids)[0, column].log_softmax(-1)[token]


def _random(batch: GroupedBatch, num_draws: int) -> Corruption:
    """Return canvases with random masks, scored at every masked slot."""
    rows = torch.arange(batch.num_rows).repeat_interleave(num_draws)
    masked = torch.rand(len(rows), batch.num_slots, generator=torch.Generator().manual_seed(1)) < 0.4
    return Corruption(rows=rows, masked=masked, scored=masked)


def test_each_token_is_scored_after_the_clean_blocks(policy: Transformer) -> None:
    batch = _batch()
    corruption = _random(batch, 3)
    terms = make_terms(batch, policy.config, corruption)
    assert terms.num_terms == int(corruption.scored.sum())
    found = token_logps(policy, terms.views)
    clean = torch.cat((batch.prompt_ids, batch.completion_ids), dim=1)
    noisy = torch.cat(
        (
            batch.prompt_ids[corruption.rows],
            torch.where(corruption.masked, MASK, batch.completion_ids[corruption.rows]),
        ),
        dim=1,
    )
    expected = {}
    for canvas, slot in corruption.scored.nonzero().tolist():
        row = int(corruption.rows[canvas])
        key = (row, slot, tuple(noisy[canvas, (slot + 6) // BLOCK * BLOCK :][:BLOCK].tolist()))
        expected[key] = _alone(policy, noisy[canvas], clean[row], slot + 6, int(clean[row, slot + 6]))
    assert terms.num_terms == int(corruption.scored.sum())
    views, width = terms.views, terms.views.ids.shape[1]
    for index, (row, slot) in enumerate(zip(terms.rows.tolist(), terms.slots.tolist(), strict=True)):
        place = int(views.slots[views.scored[index]])
        assert views.blocks is not None
        assert int(views.blocks.columns.flatten()[place]) == slot + 6
        begin = place % width - (slot + 6) % BLOCK
        shown = views.ids[place // width, begin : begin + BLOCK]
        # Columns past the canvas are visible to no slot.
        shown = tuple(shown[: min(BLOCK, 19 - (slot + 6) // BLOCK * BLOCK)].tolist())
        torch.testing.assert_close(found[index], expected[row, slot, shown], atol=1e-5, rtol=0)


def test_all_states_of_a_completion_share_a_row(policy: Transformer) -> None:
    batch = _batch()
    config = TrajectoryConfig(steps_per_segment=1)
    corruption = config.corrupt(batch, FIRST, SamplerFacts(block_length=BLOCK, is_block_causal=True))
    terms = make_terms(batch, policy.config, corruption)
    # Eleven steps per row: two of its first block, which has two slots, and three of each of the others.
    assert len(corruption.rows) == 8 * 11
    # Sixteen clean slots precede the last block; then come eleven states of four slots.
    assert terms.views.ids.shape == (8, 16 + 11 * 4)
    assert terms.views.lengths.tolist() == [60] * 8
    width, view_of_term = 60, terms.views.slots[terms.views.scored] // 60
    assert terms.rows.tolist() == view_of_term.tolist(), "views keep the order of the rows"
    assert terms.views.blocks is not None
    # The canvas ends within its last block, so that one slot is unused.
    assert int((terms.views.blocks.states == PADDING).sum()) == 8 * 3
    assert width == terms.views.ids.shape[1]


def test_equal_states_of_equal_rows_are_run_once(policy: Transformer) -> None:
    batch = _batch(num_rows=4)
    twin = batch.select(torch.tensor([0, 0, 1, 1]))
    corruption = Corruption(
        rows=torch.arange(4),
        masked=torch.ones(4, 13, dtype=torch.bool),
        scored=torch.ones(4, 13, dtype=torch.bool),
    )
    terms = make_terms(twin, policy.config, corruption)
    assert len(terms.views.ids) == 2
    assert len(terms.views.slots) == 2 * 13
    assert terms.num_terms == 4 * 13


def test_steps_are_joined_within_their_block(policy: Transformer) -> None:
    batch = _batch(num_rows=4)
    # The prompt's tail leaves two slots in the first block; then come three blocks of four, the last truncated.
    steps = torch.tensor([1, 0, 2, 3, 4, 2, 6, 5, 7, 5, 9, 8, 8]).expand(4, -1)
    joined = replace(batch, step_map=steps)
    facts = SamplerFacts(block_length=BLOCK, is_block_causal=True)
    corruption = TrajectoryConfig(steps_per_segment=2).corrupt(joined, FIRST, facts)
    scored = [corruption.scored[canvas].nonzero()[:, 0].tolist() for canvas in range(len(corruption.rows) // 4)]
    assert scored == [[0, 1], [2, 3, 5], [4], [6, 7, 9], [8], [10, 11, 12]]
    shown = [(~corruption.masked[canvas]).nonzero()[:, 0].tolist() for canvas in range(len(scored))]
    # All tokens committed in earlier segments, of earlier blocks and of this one.
    assert shown == [sorted(chain.from_iterable(scored[:canvas])) for canvas in range(len(scored))]
    terms = make_terms(joined, policy.config, corruption, BLOCK)
    assert terms.num_terms == 4 * 13
    # For a bidirectional policy a state is of the whole canvas: steps 2 and 3 are in one block, 4 and 5 in two.
    whole = TrajectoryConfig(steps_per_segment=2).corrupt(joined, FIRST, SamplerFacts(block_length=BLOCK))
    assert whole.scored[2].nonzero()[:, 0].tolist() == [4, 7, 9]
    drawn = TrajectoryConfig(steps_per_segment=2, num_shown_steps=1).corrupt(joined, FIRST, facts)
    assert drawn.scored[0].nonzero()[:, 0].tolist() == [0]


def test_the_gradient_equals_that_of_separate_forwards(policy: Transformer) -> None:
    batch = _batch(num_rows=4)
    config = TrajectoryConfig(steps_per_segment=1)
    corruption = config.corrupt(batch, FIRST, SamplerFacts(block_length=BLOCK, is_block_causal=True))
    terms = make_terms(batch, policy.config, corruption)
    weights = torch.linspace(-1, 1, 4 * 13).view(4, 13)
    # In micro-batches, as in the learner.
    for micro in make_micro_batches(terms, torch.arange(terms.num_terms), 100).terms:
        (token_logps(policy, micro.views) * weights[micro.rows, micro.slots]).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    clean = torch.cat((batch.prompt_ids, batch.completion_ids), dim=1)
    for canvas, slot in corruption.scored.nonzero().tolist():
        row = int(corruption.rows[canvas])
        noisy = clean[row].clone()
        noisy[6:][corruption.masked[canvas]] = MASK
        logp = _alone(policy, noisy, clean[row], slot + 6, int(clean[row, slot + 6]))
        (logp * weights[row, slot]).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3)


def test_micro_batches_count_all_slots_of_a_row(policy: Transformer) -> None:
    batch = _batch(num_rows=4)
    terms = make_terms(batch, policy.config, _random(batch, 1))
    length = int(terms.views.lengths.max())
    assert length > 19
    assert [len(micro.views.ids) for micro in make_micro_batches(terms, terms.rows, 2 * length).terms] == [2, 2]
    assert all(micro.views.blocks is not None for micro in make_micro_batches(terms, terms.rows, length).terms)


def test_a_masked_prompt_applies_to_every_block(policy: Transformer) -> None:
    batch = _batch(num_rows=4)
    plain = _random(batch, 1)
    prompt = torch.zeros(4, 6, dtype=torch.bool)
    prompt[:, 1] = True
    masked = Corruption(rows=plain.rows, masked=plain.masked, scored=plain.scored, prompt_masked=prompt)
    terms = make_terms(batch, policy.config, masked)
    assert (terms.views.ids[:, 1] == MASK).all()
    clean = torch.cat((batch.prompt_ids.masked_fill(prompt, MASK), batch.completion_ids), dim=1)
    canvas, slot = plain.scored.nonzero()[0].tolist()
    noisy = clean[canvas].clone()
    noisy[6:][plain.masked[canvas]] = MASK
    alone = _alone(policy, noisy, clean[canvas], slot + 6, int(clean[canvas, slot + 6]))
    (place,) = ((terms.rows == canvas) & (terms.slots == slot)).nonzero()
    torch.testing.assert_close(token_logps(policy, terms.views)[place[0]], alone, atol=1e-5, rtol=0)


def test_masked_sft_scores_each_block_after_clean_ones(policy: Transformer) -> None:
    batch = _batch(num_rows=4)
    clean = torch.cat((batch.prompt_ids, batch.completion_ids), dim=1)
    lengths = torch.tensor([19, 9, 14, 10])
    is_masked = torch.rand(clean.shape, generator=torch.Generator().manual_seed(4)) < 0.5
    is_masked &= (torch.arange(19) >= 6) & (torch.arange(19) < lengths[:, None])
    rows, columns = is_masked.nonzero(as_tuple=True)
    masked = MaskedDocuments(
        ids=torch.where(is_masked, MASK, clean),
        clean=clean,
        lengths=lengths,
        sizes=lengths - 6,
        rows=rows,
        columns=columns,
        targets=clean[rows, columns],
        weights=torch.ones(len(rows)),
    )
    expected = torch.stack(
        [
            _alone(policy, masked.ids[row, : lengths[row]], clean[row], column, int(clean[row, column]))
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
    )
    with torch.no_grad():
        torch.testing.assert_close(masked_logps(policy, masked), expected, atol=1e-5, rtol=0)


def test_with_blocks_of_one_the_likelihood_is_exact(policy: Transformer) -> None:
    policy.config = policy.config.model_copy(update={"block_length": 1})
    prompt, text = [3, 4, 5, 6, 7], [8, 9, 10, 11]
    ids, exact = [*prompt, *text], 0.0
    with torch.no_grad():
        for slot, token in enumerate(text):
            logits = policy(torch.tensor([[*ids[: 5 + slot], MASK]]))[0, -1]
            exact += float(logits.log_softmax(-1)[token])
    # Each draw masks some of the slots, and scores each after clean blocks. With all slots masked, it is the exact sum.
    bound = evidence_lower_bound(policy, prompt, text, num_draws=64, max_rows=16, seed=0)
    assert bound == pytest.approx(exact, abs=0.6)
    views = views_of_blocks(
        torch.tensor([[*prompt, *[MASK] * 4]]),
        torch.tensor([9]),
        torch.zeros(4, dtype=torch.long),
        torch.arange(5, 9),
        torch.tensor(text),
        clean_RS=torch.tensor([ids]),
        block_length=1,
    )
    with torch.no_grad():
        assert float(token_logps(policy, views).sum()) == pytest.approx(exact, abs=1e-4)


def test_the_original_sdar_codes_log_probs_are_reproduced(shared: Path) -> None:
    directory = shared / "fixtures" / "sdar-tiny"
    policy = load_policy(directory)
    for setting in json.loads((directory / "expected_generations.json").read_text()):
        for prompt, output, steps, logps in zip(
            setting["prompt"], setting["output"], setting["step_map"], setting["commit_logp"], strict=True
        ):
            batch = GroupedBatch.of(
                batch_of(
                    prompts=torch.tensor([prompt]),
                    completions=torch.tensor([output]),
                    lengths=torch.tensor([len(output)]),
                    steps=torch.tensor([steps]),
                    rewards=torch.zeros(1),
                )
            )
            facts = SamplerFacts(block_length=setting["block_length"], is_block_causal=True)
            corruption = TrajectoryConfig(steps_per_segment=1).corrupt(batch, FIRST, facts)
            terms = make_terms(batch, policy.config, corruption, setting["block_length"])
            assert len(terms.views.ids) == 1
            with torch.inference_mode():
                found = token_logps(policy, terms.views)
            assert found.tolist() == pytest.approx([logps[slot] for slot in terms.slots.tolist()], abs=1e-4)
            assert sorted(terms.slots.tolist()) == list(range(len(output)))


def test_scores_order_is_refused_for_block_causal_policies() -> None:
    config = TrajectoryConfig(steps_per_segment=1, scores_order=True)
    refusal = config.incompatibility(SamplerFacts(is_block_causal=True))
    assert refusal is not None
    assert refusal.startswith("estimator.scores_order is true, and a block-causal policy orders the slots of a block")
    assert config.incompatibility(SamplerFacts()) is None


def test_block_segments_follow_the_samplers_blocks() -> None:
    batch = _batch(num_rows=4)
    config = TrajectoryConfig(blocks_per_segment=1)
    corruption = config.corrupt(batch, FIRST, SamplerFacts(block_length=BLOCK, is_block_causal=True))
    # The prompt's six tokens leave two slots of its second block.
    assert [int(row.sum()) for row in corruption.scored[:4]] == [2, 4, 4, 3]
