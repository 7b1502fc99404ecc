"""Scored portions to the tensors that the learner trains on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.messages import ScoredPortion
from actors.plan import MASK_KEY
from learner.batch import RolloutBatch, pad_rows
from learner.counter import fold
from rewards import Grade, Outcome
from rollout.request import Completion, Request


def ungraded_groups(group_ids: Sequence[int], grades: Sequence[Grade]) -> set[int]:
    """Groups in which a grade says nothing about the completion: they are counted as failed and not trained on."""
    return {group for group, grade in zip(group_ids, grades, strict=True) if grade.outcome is not Outcome.GRADED}


def collate(portions: Sequence[ScoredPortion], gen_length: int, eos_id: int) -> RolloutBatch:
    """One round's batch: rows in the order of the portions, groups contiguous, ungraded groups left out.

    Raises RuntimeError when no group is left.
    """
    rows = [row for portion in portions for row in _graded_rows(portion)]
    if not rows:
        raise RuntimeError("no group of the round could be graded; the run log says what the graders met")
    requests = [request for request, _, _, _ in rows]
    completions = [completion for _, completion, _, _ in rows]
    prompts = [request.prompt_ids for request in requests]
    texts = [completion.token_ids[: completion.num_tokens].tolist() for completion in completions]
    return RolloutBatch(
        prompt_ids=pad_rows(prompts, eos_id),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        completion_ids=pad_rows(texts, eos_id, gen_length),
        completion_lengths=torch.tensor([len(text) for text in texts]),
        sample_keys=torch.tensor([fold(request.seed, MASK_KEY) for request in requests]),
        rewards=torch.tensor([grade.reward for _, _, grade, _ in rows]),
        group_ids=torch.tensor([group for _, _, _, group in rows]),
        step_map=pad_rows([completion.step_map.tolist() for completion in completions], -1, gen_length),
        commit_logp=_pad_floats([completion.commit_logp.tolist() for completion in completions], gen_length),
        policy_versions=torch.tensor([completion.policy_version for completion in completions]),
    )


def _graded_rows(scored: ScoredPortion) -> list[tuple[Request, Completion, Grade, int]]:
    left_out = ungraded_groups(scored.portion.group_ids, scored.grades)
    rows = zip(scored.portion.requests, scored.completions, scored.grades, scored.portion.group_ids, strict=True)
    return [row for row in rows if row[3] not in left_out]


def _pad_floats(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])
