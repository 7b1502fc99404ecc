"""RLDF's estimator: which states it samples, what it scores, and what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from learner.batch import GroupedBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SampledStatesConfig, SamplerFacts
from tests.learner.batches import batch_of

UPDATE, SAMPLER = InnerUpdate(0, 1), SamplerFacts()


def batch(steps: list[list[int]], logps: list[list[float]], lengths: list[int]) -> GroupedBatch:
    """Return rows of the same prompt, with these commits."""
    num_rows, num_slots = len(steps), len(steps[0])
    return GroupedBatch.of(
        batch_of(
            prompts=torch.ones(num_rows, 2, dtype=torch.int64),
            completions=torch.ones(num_rows, num_slots, dtype=torch.int64),
            lengths=torch.tensor(lengths),
            steps=torch.tensor(steps),
            commit_logp=torch.tensor(logps),
            rewards=torch.zeros(num_rows),
            group_ids=torch.zeros(num_rows, dtype=torch.int64),
        )
    )


def drawn(config: SampledStatesConfig, rows: GroupedBatch) -> list[list[int]]:
    """Return the denoise steps of each row's drawn states, in the order of its draws."""
    corruption = config.corrupt(rows, UPDATE, SAMPLER)
    found: list[list[int]] = [[] for _ in range(rows.num_rows)]
    assert corruption.committed is not None
    for row, committed_L in zip(corruption.rows.tolist(), corruption.committed, strict=True):
        found[row].append(int(rows.step_map[row][committed_L].unique()))
    return found


def test_improbable_steps_are_sampled_in_proportion_to_their_surprise() -> None:
    """Surprises of 1, 0 and 2 nats at temperature 2; each row draws once."""
    rows = batch([[0, 1, 1, 2]] * 4000, [[-1.0, -0.5, 0.5, -2.0]] * 4000, [4] * 4000)
    counts = Counter(step for (step,) in drawn(SampledStatesConfig(num_sampled=1, temperature=2.0), rows))
    expected = torch.tensor([0.5, 0.0, 1.0]).softmax(0)
    for step, share in enumerate(expected.tolist()):
        assert counts[step] / 4000 == pytest.approx(share, abs=0.03)


def test_a_second_state_is_another_one_as_long_as_there_is_one() -> None:
    """The first of two draws follows the softmax, and the second the softmax over the other states."""
    rows = batch([[0, 1, 2]] * 4000, [[-2.0, -1.0, 0.0]] * 4000, [3] * 4000)
    pairs = Counter(map(tuple, drawn(SampledStatesConfig(num_sampled=2), rows)))
    assert all(first != second for first, second in pairs)
    chance = torch.tensor([2.0, 1.0, 0.0]).softmax(0)
    assert pairs[1, 0] / 4000 == pytest.approx(float(chance[1] * chance[0] / (1 - chance[1])), abs=0.03)


def test_a_completion_with_few_states_repeats_them() -> None:
    """All of them come first; the repetitions follow the softmax, here almost always of the improbable step."""
    rows = batch([[0, 1, 1]] * 500, [[-9.0, 0.0, 0.0]] * 500, [3] * 500)
    steps = drawn(SampledStatesConfig(num_sampled=4), rows)
    assert all(sorted(of_row[:2]) == [0, 1] and of_row[2:] == [0, 0] for of_row in steps)


def test_only_the_text_counts_and_padding_has_no_state() -> None:
    """Steps that commit nothing but fill are never drawn, and fill is masked but not scored."""
    rows = batch([[0, 1, 2, -1], [0, 1, 2, 3]], [[-1.0, -1.0, -9.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [2, 0])
    corruption = SampledStatesConfig(num_sampled=2).corrupt(rows, UPDATE, SAMPLER)
    assert corruption.rows.tolist() == [0, 0]
    by_step = {int(masked.logical_not().sum()): place for place, masked in enumerate(corruption.masked)}
    assert corruption.masked[by_step[0]].tolist() == [True, True, True, True]
    assert corruption.scored[by_step[0]].tolist() == [True, True, False, False]
    assert corruption.masked[by_step[1]].tolist() == [False, True, True, True]
    assert corruption.scored[by_step[1]].tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"is_block_causal": True}, "a block-causal policy does not see later ones"),
        ({"edits": True}, "leave editing_threshold out"),
    ],
)
def test_samplers_without_such_states_are_refused(facts: dict[str, bool], part: str) -> None:
    assert part in (SampledStatesConfig().incompatibility(replace(SAMPLER, **facts)) or "")
    assert SampledStatesConfig().incompatibility(SAMPLER) is None


@pytest.mark.parametrize("changes", [{"level": "token"}, {"normalize_by": "round"}, {"old": "sampler"}])
def test_a_least_probability_needs_draws_and_the_learners_likelihoods(changes: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="min_probability needs level: canvas_token"):
        LearnerConfig.model_validate({"algorithm": "rldf", "num_rounds": 1, "objective": changes})
