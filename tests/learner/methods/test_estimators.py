"""Random masks of the likelihood estimators: the states they cover, and unbiasedness."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from pydantic import ValidationError

from learner.batch import GroupedBatch
from learner.estimators import (
    BlockMasksConfig,
    ElboConfig,
    Estimator,
    InnerUpdate,
    OneStepConfig,
    RandomMasksConfig,
    SamplerFacts,
    TrajectoryConfig,
    make_terms,
    token_logps,
)
from learner.model.transformer import Transformer

FIRST = InnerUpdate(0, 1)
SAMPLER = SamplerFacts(block_length=4, has_fallback=True)


def _many(batch: GroupedBatch, row: int, count: int) -> GroupedBatch:
    """Repeat one row with different random draws, in groups of 8."""
    places = torch.arange(count)
    return replace(
        batch.select(torch.full((count,), row)),
        sample_keys=places * 31,
        group_keys=places // 8 * 8 * 31,
        group_places=places % 8,
        group_sizes=torch.full((count,), 8),
    )


def test_each_block_has_its_own_mask_counts(grouped: GroupedBatch) -> None:
    """EBPO: each block has between one and all of its slots masked, spread evenly over its draws, without bias."""
    config = ElboConfig(num_draws=32, counts="block", complement=False, slots="text")
    many = _many(grouped, int(grouped.completion_lengths.argmax()), 16)
    facts = SamplerFacts(block_length=4, is_block_causal=True)
    drawn = config.corrupt(many, FIRST, facts)
    is_text, block_BL = many.completion_mask(), facts.blocks(many)
    assert len(block_BL[0].unique()) > 1
    assert not drawn.masked[~is_text[drawn.rows]].any()
    assert drawn.weights is not None
    for block in block_BL[0].unique().tolist():
        here = (block_BL[0] == block) & is_text[0]
        counts_BD = drawn.masked[:, here].sum(dim=1).view(16, 32)
        size = int(here.sum())
        # 32 equidistant levels: each number of masked slots occurs about equally often, wherever the levels begin.
        assert all(abs(int((row == k).sum()) - 32 / size) < 1 for row in counts_BD for k in range(1, size + 1))
        assert (drawn.weights[:, here] * 32 * counts_BD.flatten()[:, None] == size).all()
    mean_L = (drawn.weights * drawn.masked).mean(dim=0) * 32
    torch.testing.assert_close(mean_L, is_text[0].float(), atol=0.15, rtol=0)


def test_a_bidirectional_policy_counts_as_one_block(grouped: GroupedBatch) -> None:
    config = ElboConfig(num_draws=8, counts="block", complement=False)
    drawn = config.corrupt(grouped, FIRST, SamplerFacts(block_length=4))
    assert drawn.weights is not None
    sizes = config.sizes(grouped)[drawn.rows]
    counts = drawn.masked.sum(dim=1)
    torch.testing.assert_close(drawn.weights[:, 0] * 8, sizes / counts)
    assert set(counts[sizes == 8].tolist()) == set(range(1, 9))
    with pytest.raises(ValidationError, match="counts: block has no complements"):
        ElboConfig(counts="block")


@pytest.mark.parametrize(
    ("estimator", "splits_tokens", "splits_rows"),
    [
        (OneStepConfig(), False, False),
        (RandomMasksConfig(), True, True),
        (RandomMasksConfig(coupled=False), False, False),
        (BlockMasksConfig(num_draws=1), False, False),
        (BlockMasksConfig(num_draws=4), True, True),
        (ElboConfig(num_draws=1), False, False),
        (ElboConfig(num_draws=2), True, True),
        (TrajectoryConfig(num_segments=4), False, True),
    ],
)
def test_facts_about_split_units_agree_with_the_corruption(
    grouped: GroupedBatch, estimator: Estimator, splits_tokens: bool, splits_rows: bool
) -> None:
    corruption = estimator.corrupt(grouped, FIRST, SAMPLER)
    canvases, slots = corruption.scored.nonzero(as_tuple=True)
    parts = torch.zeros_like(corruption.rows) if corruption.parts is None else corruption.parts
    found = set(zip(corruption.rows[canvases].tolist(), slots.tolist(), parts[canvases].tolist(), strict=True))
    of_tokens = Counter((row, slot) for row, slot, _ in found)
    of_rows = Counter(row for row, _ in {(row, part) for row, _, part in found})
    assert (max(of_tokens.values()) > 1, max(of_rows.values()) > 1) == (splits_tokens, splits_rows)
    assert (estimator.facts.splits_tokens, estimator.facts.splits_rows) == (splits_tokens, splits_rows)


def test_one_segment_equals_diffu_grpo(policy: Transformer, grouped: GroupedBatch) -> None:
    """StepMerge with one segment: the same canvases and scored tokens as diffu-GRPO."""
    one = make_terms(grouped, policy.config, OneStepConfig(p_mask_prompt=0).corrupt(grouped, FIRST, SAMPLER))
    merged = make_terms(grouped, policy.config, TrajectoryConfig(num_segments=1).corrupt(grouped, FIRST, SAMPLER))
    assert torch.equal(one.views.ids, merged.views.ids)
    with torch.no_grad():
        torch.testing.assert_close(token_logps(policy, one.views), token_logps(policy, merged.views))


@pytest.mark.parametrize(("settings", "lengths"), [({"steps_per_segment": 1}, 1), ({"num_segments": 2}, 2)])
def test_a_segments_canvas_shows_earlier_commits(grouped: GroupedBatch, settings: dict[str, int], lengths: int) -> None:
    full = replace(grouped, completion_lengths=torch.full((12,), 8)).select(grouped.completion_lengths > 4)
    corruption = TrajectoryConfig(**settings).corrupt(full, FIRST, SAMPLER)  # type: ignore[arg-type]
    assert corruption.parts is not None
    for canvas, (row, part) in enumerate(zip(corruption.rows.tolist(), corruption.parts.tolist(), strict=True)):
        for slot, step in enumerate(full.step_map[row].tolist()):
            assert corruption.masked[canvas, slot] == (step >= part * lengths)
            assert corruption.scored[canvas, slot] == (step // lengths == part)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_block_segment_is_scored_in_its_initial_state(grouped: GroupedBatch, blocks: int) -> None:
    # Different numbers of steps in each block of each row.
    steps = grouped.step_map.where(grouped.step_map < 0, grouped.step_map // (1 + torch.arange(12)[:, None] % 3))
    corruption = TrajectoryConfig(blocks_per_segment=blocks).corrupt(replace(grouped, step_map=steps), FIRST, SAMPLER)
    assert corruption.parts is not None
    assert len(corruption.rows) == sum(-(-length // (4 * blocks)) for length in grouped.completion_lengths.tolist())
    for canvas, (row, part) in enumerate(zip(corruption.rows.tolist(), corruption.parts.tolist(), strict=True)):
        for slot in range(8):
            assert corruption.masked[canvas, slot] == (slot >= part * 4 * blocks)
            is_text = slot < grouped.completion_lengths[row]
            assert corruption.scored[canvas, slot] == (is_text and slot // (4 * blocks) == part)


@pytest.mark.parametrize("given", [{}, {"num_segments": 2, "blocks_per_segment": 1}])
def test_only_one_kind_of_segment_may_be_given(given: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"give one of num_segments, .* and branches"):
        TrajectoryConfig(**given)  # type: ignore[arg-type]


def test_slots_that_were_never_denoised_are_masked_throughout(grouped: GroupedBatch) -> None:
    corruption = TrajectoryConfig(steps_per_segment=1).corrupt(grouped, FIRST, SAMPLER)
    never = grouped.step_map[corruption.rows] < 0
    assert never.any()
    assert corruption.masked[never].all()


def test_every_text_token_is_scored_once_over_all_segments(grouped: GroupedBatch) -> None:
    corruption = TrajectoryConfig(steps_per_segment=2).corrupt(grouped, FIRST, SAMPLER)
    times = torch.zeros(12, 8, dtype=torch.long).index_add_(0, corruption.rows, corruption.scored.long())
    assert torch.equal(times == 1, grouped.completion_mask())


def test_segments_divide_the_steps_of_the_whole_canvas(grouped: GroupedBatch) -> None:
    """Two slots a step: the whole canvas takes four steps, and a completion that ends in its first block takes two."""
    corruption = TrajectoryConfig(num_segments=4).corrupt(grouped, FIRST, SAMPLER)
    assert corruption.parts is not None
    assert (grouped.completion_lengths <= 4).any()
    step = torch.where(corruption.scored, grouped.step_map[corruption.rows], -1)
    assert torch.equal(step.amax(dim=1), corruption.parts)


@pytest.mark.parametrize("settings", [{"steps_per_segment": 2}, {"num_segments": 2}])
def test_the_first_steps_can_be_shown_in_all_segments(grouped: GroupedBatch, settings: dict[str, int]) -> None:
    config = TrajectoryConfig(num_shown_steps=1, **settings)  # type: ignore[arg-type]
    corruption = config.corrupt(grouped, FIRST, SAMPLER)
    assert corruption.parts is not None
    step_RL, parts_R1 = grouped.step_map[corruption.rows], corruption.parts[:, None]
    is_in_segment_RL = (step_RL > 2 * parts_R1) & (step_RL <= 2 * parts_R1 + 2)
    assert torch.equal(corruption.scored, is_in_segment_RL & grouped.completion_mask()[corruption.rows])
    assert torch.equal(corruption.masked, (step_RL > 2 * parts_R1) | (step_RL < 0))


def test_a_sampler_without_steps_beyond_the_shown_ones_is_refused() -> None:
    config = TrajectoryConfig(num_segments=2, num_shown_steps=3)
    assert "nothing would be scored" in str(config.incompatibility(SamplerFacts(max_denoise_steps=3)))
    assert config.incompatibility(SamplerFacts(max_denoise_steps=4)) is None


def test_uniformly_sampled_segments_are_distinct_and_cover_all(grouped: GroupedBatch) -> None:
    row = int(grouped.completion_lengths.argmax())
    many = _many(grouped, row, 600)
    config = TrajectoryConfig(steps_per_segment=1, num_sampled=2)
    corruption = config.corrupt(many, FIRST, SAMPLER)
    assert corruption.parts is not None
    pairs = Counter(map(tuple, corruption.parts.unflatten(0, (600, 2)).tolist()))
    assert set(pairs) == set(combinations(range(4), 2))
    assert max(pairs.values()) < 2 * min(pairs.values()), "no pair is likelier"


def test_sampled_tokens_are_weighted_to_the_mean_of_all(grouped: GroupedBatch) -> None:
    """Their weighted sum over the completion's length equals the mean of all tokens."""
    config = TrajectoryConfig(steps_per_segment=1, num_sampled=1, weigh="value")
    corruption = config.corrupt(grouped, FIRST, SAMPLER)
    assert corruption.importance is None
    assert corruption.weights is not None
    totals = torch.zeros(12).index_add_(0, corruption.rows, (corruption.weights * corruption.scored).sum(dim=1))
    torch.testing.assert_close(totals, grouped.completion_lengths.float())
    assert (corruption.weights > 1).any()


def test_weighing_values_needs_a_uniform_proposal() -> None:
    with pytest.raises(ValidationError, match="proposal must be uniform, not entropy"):
        TrajectoryConfig(steps_per_segment=1, num_sampled=1, weigh="value", proposal="entropy")


def test_rivals_of_an_order_are_all_slots_left_masked(grouped: GroupedBatch) -> None:
    """Rivals include later blocks and blocks never denoised, but not the slots that the segment commits together."""
    config = TrajectoryConfig(num_segments=2, scores_order=True)
    corruption = config.corrupt(grouped, FIRST, SAMPLER)
    assert corruption.parts is not None
    assert corruption.rivals is not None
    step_RL = grouped.step_map[corruption.rows]
    assert torch.equal(corruption.rivals, (step_RL > 2 * corruption.parts[:, None] + 1) | (step_RL < 0))
    assert corruption.rivals.any()


def test_all_tokens_are_scored_up_to_the_last_step_with_text(grouped: GroupedBatch) -> None:
    """The first text ends in its second slot. Its steps 0 and 1 commit stop tokens too, steps 2 and 3 nothing else, as
    LLaDA does: text, one `<|eot_id|>` and then only `<|endoftext|>`. The second text is cut off."""
    completions = torch.tensor([[5, 37, 39, 6, 39, 39, 39, 39], [5, 4, 4, 6, 4, 4, 4, 4]])
    batch = replace(
        _many(grouped, 0, 2),
        completion_ids=completions,
        completion_lengths=torch.tensor([2, 8]),
        step_map=torch.tensor([[1, 0, 1, 0, 2, 2, 3, 3]] * 2),
        truncated=torch.tensor([False, True]),
        is_stop=(completions == 37) | (completions == 39),
    )
    config = TrajectoryConfig(steps_per_segment=1, slots="denoised", weigh="mean")
    corruption = config.corrupt(batch, FIRST, SAMPLER)
    assert corruption.rows.tolist() == [0, 0, 1, 1, 1, 1]
    assert corruption.scored[0].nonzero()[:, 0].tolist() == [1, 3]
    assert corruption.scored[1].nonzero()[:, 0].tolist() == [0, 2]
    assert config.sizes(batch).tolist() == [4, 8], "no stop token ends what was cut off"
    assert corruption.importance is not None
    assert corruption.importance[:, 0].tolist() == [1 / 2] * 2 + [1 / 4] * 4


def test_segments_are_sampled_by_recorded_entropy(grouped: GroupedBatch) -> None:
    """The second step has nearly all entropy of the sampling distributions, the first that of untempered
    predictions."""
    row = int(grouped.completion_lengths.argmax())
    many = _many(grouped, row, 200)
    many = replace(
        many,
        commit_entropy=(many.step_map == 0).float() * 1e3,
        commit_law_entropy=(many.step_map == 1).float() * 1e3,
    )
    config = TrajectoryConfig(steps_per_segment=1, num_sampled=1, proposal="entropy")
    corruption = config.corrupt(many, FIRST, SAMPLER)
    assert corruption.parts is not None
    assert corruption.parts.unique().tolist() == [1]


@pytest.mark.parametrize("proposal", ["uniform", "entropy"])
@pytest.mark.parametrize("num_sampled", [1, 3])
def test_importance_weights_have_mean_one(grouped: GroupedBatch, proposal: str, num_sampled: int) -> None:
    row = int(grouped.completion_lengths.argmax())
    many = _many(grouped, row, 6000)
    config = TrajectoryConfig(steps_per_segment=1, num_sampled=num_sampled, proposal=proposal)  # type: ignore[arg-type]
    corruption = config.corrupt(many, FIRST, SAMPLER)
    assert corruption.importance is not None
    assert corruption.parts is not None
    totals = torch.zeros(4).index_add_(0, corruption.parts, corruption.importance[:, 0])
    torch.testing.assert_close(totals / 6000, torch.ones(4), atol=0.07, rtol=0)
    assert int(corruption.rows.bincount().max()) <= num_sampled


def test_only_selects_fallback_or_uncertain_tokens(grouped: GroupedBatch) -> None:
    fallback = TrajectoryConfig(steps_per_segment=1, only="fallback").corrupt(grouped, FIRST, SAMPLER)
    scored = torch.zeros(12, 8).index_add_(0, fallback.rows, fallback.scored.float()) > 0
    assert torch.equal(scored, grouped.fallback & grouped.completion_mask())
    uncertain = TrajectoryConfig(steps_per_segment=1, only="uncertain").corrupt(grouped, FIRST, SAMPLER)
    scored = torch.zeros(12, 8).index_add_(0, uncertain.rows, uncertain.scored.float()) > 0
    for row, length in enumerate(grouped.completion_lengths.tolist()):
        kept = grouped.commit_entropy[row][scored[row]]
        left = grouped.commit_entropy[row, :length][~scored[row, :length]]
        assert len(kept) == -(-length // 4)
        assert not len(left) or kept.min() >= left.max()


def test_fallback_needs_a_sampler_with_fallback() -> None:
    config = TrajectoryConfig(steps_per_segment=1, only="fallback")
    assert "never falls back" in str(config.incompatibility(SamplerFacts(has_fallback=False)))
    assert config.incompatibility(SAMPLER) is None


def test_a_mask_and_its_complement_cover_every_token_once(grouped: GroupedBatch) -> None:
    corruption = RandomMasksConfig().corrupt(grouped, FIRST, SAMPLER)
    masked = corruption.masked.unflatten(0, (12, 3))
    assert masked[:, 0].all()
    assert torch.equal(masked[:, 1], ~masked[:, 2])
    assert corruption.weights is not None
    # One t for the whole round.
    assert len(corruption.weights.unflatten(0, (12, 3))[:, 1].unique()) == 1


def test_spread_ratios_cover_the_range_over_the_updates(grouped: GroupedBatch) -> None:
    config = RandomMasksConfig(min_ratio=0, max_ratio=1, ratios="spread", coupled=False)
    many = _many(grouped, 0, 2000)
    shares = torch.stack(
        [config.corrupt(many, InnerUpdate(index, 5), SAMPLER).masked.float().mean(dim=1) for index in range(5)]
    )
    # A row's ratios are a fifth apart, so that their mean hardly varies between rows.
    assert abs(float(shares.mean()) - 0.5) < 0.02
    assert float(shares.mean(dim=0).std()) < 0.12


def _exhaustive_elbo(policy: Transformer, batch: GroupedBatch, num_slots: int) -> float:
    """Return the mean over k = 1..L, and over all sets of k masked slots, of L / k times the sum of log-
    probabilities."""
    prompt, tokens = batch.prompt_ids[0, : batch.prompt_lengths[0]], batch.completion_ids[0]
    total = 0.0
    for count in range(1, num_slots + 1):
        values = []
        for masked in combinations(range(num_slots), count):
            canvas = tokens.clone()
            canvas[list(masked)] = policy.config.mask_token_id
            with torch.no_grad():
                logps = policy(torch.cat((prompt, canvas))[None])[0, len(prompt) :].log_softmax(-1)
            values.append(sum(float(logps[slot, tokens[slot]]) for slot in masked))
        total += num_slots / count * sum(values) / len(values)
    return total / num_slots


@pytest.mark.parametrize(
    "settings",
    [
        {"counts": "group", "complement": True, "num_draws": 1},
        {"counts": "group", "complement": False, "num_draws": 2},
        {"counts": "row", "complement": False, "num_draws": 4},
        {"counts": "row", "complement": True, "num_draws": 2},
    ],
)
def test_the_mean_estimate_equals_the_exhaustive_elbo(
    policy: Transformer, grouped: GroupedBatch, settings: dict[str, object]
) -> None:
    short = replace(
        grouped,
        completion_ids=grouped.completion_ids[:, :4],
        completion_lengths=torch.full((12,), 4),
        step_map=grouped.step_map[:, :4],
    )
    many = _many(short, 0, 4000)
    config = ElboConfig(**settings)  # type: ignore[arg-type]
    terms = make_terms(many, policy.config, config.corrupt(many, FIRST, SAMPLER))
    assert len(terms.views.ids) <= 15, "equal canvases are run once"
    with torch.no_grad():
        values = torch.zeros(4000).index_add_(0, terms.rows, terms.weights * token_logps(policy, terms.views))
    error = 4 * float(values.std()) / 4000**0.5
    assert float(values.mean()) == pytest.approx(_exhaustive_elbo(policy, many, 4), abs=error)


@pytest.mark.parametrize("slots", ["text", "denoised", "canvas"])
@pytest.mark.parametrize("complement", [True, False])
def test_an_elbo_scores_its_slots(grouped: GroupedBatch, slots: str, complement: bool) -> None:
    config = ElboConfig(num_draws=16, counts="row", complement=complement, slots=slots)  # type: ignore[arg-type]
    corruption = config.corrupt(grouped, FIRST, SAMPLER)
    scored_BL = torch.zeros_like(grouped.completion_ids, dtype=torch.bool)
    for row, scored_L in zip(corruption.rows.tolist(), corruption.scored, strict=True):
        scored_BL[row] |= scored_L
    expected = {
        "text": grouped.completion_mask(),
        "denoised": grouped.step_map >= 0,
        "canvas": torch.ones_like(scored_BL),
    }
    assert torch.equal(scored_BL, expected[slots])
    assert config.sizes(grouped).tolist() == expected[slots].sum(dim=1).tolist()
    assert not bool((grouped.step_map >= 0).all()), "some of the canvas was never denoised"


def test_quadrature_integrates_a_polynomial_of_the_ratio_exactly(grouped: GroupedBatch) -> None:
    """With log p = -t^2 for every token, the bound is the integral of -L t^2, up to rounding t L to a whole number."""
    wide = replace(
        grouped,
        completion_ids=torch.zeros(12, 1000, dtype=torch.long),
        completion_lengths=torch.full((12,), 1000),
        step_map=torch.zeros(12, 1000, dtype=torch.long),
    )
    corruption = ElboConfig(counts="quadrature", complement=False, num_draws=3).corrupt(wide, FIRST, SAMPLER)
    ratio = corruption.masked.float().mean(dim=1)
    assert corruption.weights is not None
    values = -(corruption.weights[:, 0] * corruption.masked.sum(dim=1) * ratio**2)
    totals = torch.zeros(12).index_add_(0, corruption.rows, values)
    torch.testing.assert_close(totals, torch.full((12,), -1000 / 3), atol=1.0, rtol=0)


def test_block_masks_are_states_of_a_blockwise_sampler(grouped: GroupedBatch) -> None:
    many = replace(_many(grouped, 0, 400), completion_lengths=torch.full((400,), 7))
    corruption = BlockMasksConfig(num_draws=2).corrupt(many, FIRST, SAMPLER)
    masked = corruption.masked
    in_second = masked[:, 4:7].sum(dim=1)
    assert masked[:, 7].all(), "what follows the text is masked"
    assert (in_second >= 1).all()
    # A partly masked second block is the selected one, and then the first block is lightly corrupted.
    light = masked[in_second < 3][:, :4].float().mean()
    assert abs(float(light) - 0.15) < 0.03
    # The two draws of a row select its two blocks.
    pairs = masked.unflatten(0, (400, 2))
    assert ((pairs[:, :, 4:7].sum(dim=2) == 3).any(dim=1)).all()


def test_a_round_without_scored_tokens_still_runs_a_forward(policy: Transformer, grouped: GroupedBatch) -> None:
    empty = replace(grouped, completion_lengths=torch.zeros(12, dtype=torch.long))
    for config in (
        OneStepConfig(),
        ElboConfig(),
        BlockMasksConfig(),
        RandomMasksConfig(),
        TrajectoryConfig(num_segments=2),
    ):
        terms = make_terms(empty, policy.config, config.corrupt(empty, FIRST, SAMPLER))
        assert terms.num_terms == 1
        assert float(terms.importance.sum()) == 0
