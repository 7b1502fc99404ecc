"""Collation of a round's scored completions into the learner's batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.messages import ScoredWorkUnit
from actors.plan import MASK_KEY
from actors.training.dynamic_sampling import GroupSelection
from learner.batch import RolloutBatch, pad_rows
from learner.model.deferred import torch
from learner.seeds import fold, key_of_bytes
from rewards import Grade
from rollout.request import Completion, FinishReason, Request, StepAnswers, Writes


class _Row(NamedTuple):
    """A completion with what belongs to it."""

    request: Request
    completion: Completion
    grade: Grade
    group: int
    step_rewards: NDArray[np.float32] | None


def part_names_of(grades: Sequence[Grade]) -> list[str]:
    """Return the names of the parts of a round's rewards; a grade that is zero for lack of a better one has none."""
    return list(dict.fromkeys(name for grade in grades for name in grade.parts))


def collate(
    work_units: Sequence[ScoredWorkUnit], num_slots: int, stop_ids: Sequence[int], selection: GroupSelection
) -> RolloutBatch | None:
    """Build a round's batch: the chosen rows in the order of their groups, independent of the work units.

    None if no row is left. Completions are padded to `num_slots`, which is `SamplingParams.max_slots`, with the first
    stop token.
    """
    trained = selection.trained_rows([(scored.work_unit.group_ids, scored.grades) for scored in work_units])
    rows = [row for scored, kept in zip(work_units, trained, strict=True) for row in _rows(scored, kept)]
    if not rows:
        return None
    # A work unit has similar lengths, and minibatches are contiguous shares: the order of groups mixes the lengths.
    rows.sort(key=attrgetter("group"))
    requests, completions, grades = ([getattr(row, name) for row in rows] for name in _Row._fields[:3])
    prompts = [request.prompt_ids for request in requests]
    # Include the whole last block: the tokens after the end of text were context of the text's last tokens.
    texts = [completion.token_ids.tolist() for completion in completions]
    completion_ids = pad_rows(texts, stop_ids[0], num_slots)
    part_names = sorted(part_names_of(grades))
    return RolloutBatch(
        prompt_ids=pad_rows(prompts, stop_ids[0]),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        completion_ids=completion_ids,
        completion_lengths=torch.tensor([completion.num_tokens for completion in completions]),
        sample_keys=torch.tensor([fold(request.seed, MASK_KEY) for request in requests]),
        rewards=torch.tensor([grade.reward for grade in grades]),
        reward_parts=torch.tensor([[grade.parts.get(name, 0.0) for name in part_names] for grade in grades]),
        correct=torch.tensor([grade.correct for grade in grades]),
        truncated=torch.tensor([completion.finish_reason is FinishReason.LENGTH for completion in completions]),
        is_stop=torch.isin(completion_ids, torch.tensor(stop_ids)),
        group_ids=torch.tensor([row.group for row in rows]),
        step_map=pad_rows([completion.step_map.tolist() for completion in completions], -1, num_slots),
        commit_logp=_padded([completion.commit_logp for completion in completions], num_slots),
        commit_entropy=_padded([completion.commit_entropy for completion in completions], num_slots),
        commit_law_entropy=_padded([completion.commit_law_entropy for completion in completions], num_slots),
        fallback=_padded([completion.fallback for completion in completions], num_slots),
        num_forwards=torch.tensor([completion.num_forwards for completion in completions]),
        policy_versions=torch.tensor([completion.policy_version for completion in completions]),
        **_process_rewards(completions, grades, num_slots),
        **_writes([completion.writes for completion in completions if completion.writes is not None]),
        **_step_rewards([row.step_rewards for row in rows if row.step_rewards is not None]),
        **_step_answers([(row.completion.step_answers, row.step_rewards) for row in rows], num_slots),
        **_node_keys(requests, completions),
    )


def _process_rewards(
    completions: Sequence[Completion], grades: Sequence[Grade], num_slots: int
) -> dict[str, torch.Tensor]:
    """Collate the rewards of blocks, each at the slots that its block's last step committed (dLLM-RL)."""
    if all(grade.block_rewards is None for grade in grades):
        return {}
    rewards = torch.zeros(len(grades), num_slots)
    for row, (completion, grade) in enumerate(zip(completions, grades, strict=True)):
        begin = 0
        for end, reward in grade.block_rewards or ():
            steps = torch.tensor(completion.step_map[begin:end])
            rewards[row, begin:end] = torch.where(steps == steps.max(), reward, 0.0)
            begin = end
    sums = [sum(reward for _, reward in grade.block_rewards or ()) for grade in grades]
    outcomes = [grade.reward - of_blocks for grade, of_blocks in zip(grades, sums, strict=True)]
    return {"process_rewards": rewards, "outcome_rewards": torch.tensor(outcomes)}


def _writes(edited: Sequence[Writes]) -> dict[str, torch.Tensor]:
    """Collate all writes of completions with edited tokens. Either all completions of a round have them, or none."""
    if not edited:
        return {}
    width = max(map(len, edited))
    columns = ([getattr(writes, name) for writes in edited] for name in ("steps", "slots", "token_ids"))
    written = torch.stack([_padded(column, width) for column in columns], dim=2).long()
    is_write_BE = torch.arange(width) < torch.tensor([len(writes) for writes in edited])[:, None]
    return {
        "writes": written.where(is_write_BE[:, :, None], -1),
        "write_logp": _padded([writes.logp for writes in edited], width),
    }


def _step_rewards(rewards: Sequence[NDArray[np.float32]]) -> dict[str, torch.Tensor]:
    """Collate the rewards of step answers. Either all completions of a round have them, or none."""
    return {"step_rewards": _padded(rewards, max(map(len, rewards)), fill=np.nan)} if rewards else {}


def _step_answers(
    answered: Sequence[tuple[StepAnswers | None, NDArray[np.float32] | None]], num_slots: int
) -> dict[str, torch.Tensor]:
    """Collate the tokens of step answers, as many steps as rewards. Either all completions of a round have them, or
    none."""
    given = [(answers, len(rewards)) for answers, rewards in answered if answers is not None and rewards is not None]
    if not given:
        return {}
    tokens = torch.full((len(given), max(num_steps for _, num_steps in given), num_slots), -1, dtype=torch.int32)
    for of_row, (answers, _) in zip(tokens, given, strict=True):
        of_row[torch.from_numpy(answers.steps).long(), : answers.token_ids.shape[1]] = torch.from_numpy(
            answers.token_ids
        )
    return {"step_answers": tokens}


def _node_keys(requests: Sequence[Request], completions: Sequence[Completion]) -> dict[str, torch.Tensor]:
    """Collate the keys of a rollout tree's nodes. Either all completions of a round are leaves of trees, or none."""
    if not any(request.node_seeds for request in requests):
        return {}
    return {"node_keys": torch.tensor(list(map(_nodes_of, requests, completions)))}


def _nodes_of(request: Request, completion: Completion) -> list[int]:
    """Return the keys of the nodes that a completion passed through: hashes of seed and canvas.

    The seed tells apart siblings with the same tokens. The tokens tell apart completions with the same seed that
    diverged by rounding; such a completion becomes another child of the last node that they share.
    """
    keys: list[int] = []
    for level, seed in enumerate(request.node_seeds, 1):
        is_shown = (completion.step_map >= 0) & (completion.step_map < level * request.steps_per_level)
        canvas = (np.flatnonzero(is_shown).astype(np.int64), completion.token_ids[is_shown].astype(np.int64))
        keys.append(fold(seed, key_of_bytes(np.concatenate(canvas).tobytes()), *keys[-1:]))
    return [*keys, request.seed]


def _rows(scored: ScoredWorkUnit, kept: Sequence[int]) -> list[_Row]:
    work_unit, rewards = scored.work_unit, scored.step_rewards
    return [
        _Row(
            request=work_unit.requests[row],
            completion=scored.completions[row],
            grade=scored.grades[row],
            group=work_unit.group_ids[row],
            step_rewards=None if rewards is None else rewards[row],
        )
        for row in kept
    ]


def _padded(rows: Sequence[NDArray[Any]], width: int, fill: float = 0) -> torch.Tensor:
    """Pad rows with `fill` to [len(rows), width], in the arrays' dtype."""
    padded = np.full((len(rows), width), fill, dtype=rows[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)
