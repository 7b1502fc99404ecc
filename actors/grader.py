"""Grader worker: decodes completions and grades them.

An ordinary class, which `actors/cluster.py` makes a Ray actor. It needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from actors.columnar import Completions
from actors.messages import EVALUATION_ROUND, ScoredWorkUnit, WorkUnit, WorkUnitSummary
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rewards import Grader, Problem, RewardConfig, Sample, TaskConfig
from rewards.sample import TextBlock
from rollout.canvas import Canvas
from rollout.renoising.request import RenoisedCompletion, RenoisingRequest
from rollout.request import Completion, FinishReason, Request


class GraderWorker:
    """Grader of completions, for rewards and evaluations."""

    def __init__(self, task: TaskConfig, reward: RewardConfig, tokenizer: Path) -> None:
        """Create the grader. Raises ValueError if a term of the reward cannot work on this machine."""
        self._grader = Grader(task, reward)
        self._tokenizer = ChatTokenizer(tokenizer)
        # Only terms reward blocks.
        self._shape = load_config(tokenizer) if reward.terms else None

    def ready(self) -> int:
        """Return the process id once the actor is up; a different id means that it restarted."""
        return os.getpid()

    def grade(self, work_unit: WorkUnit, completions: Sequence[Completion]) -> tuple[ScoredWorkUnit, WorkUnitSummary]:
        """Grade each completion's text up to its end-of-text token; what follows is not part of the answer.

        An evaluation is graded by the task alone, without the reward's terms. Raises RewardUnavailableError if a
        service that a term calls does not answer.
        """
        samples = self._samples(work_unit, completions)
        is_evaluation = work_unit.key.round == EVALUATION_ROUND
        grades = self._grader.evaluate(samples) if is_evaluation else self._grader.grade(samples)
        texts = [sample.text for sample in samples]
        summary = WorkUnitSummary.of(completions, grades, texts, self._grader.take_costs())
        return ScoredWorkUnit(work_unit=work_unit, completions=Completions(completions), summary=summary), summary

    def _samples(self, work_unit: WorkUnit, completions: Sequence[Completion]) -> list[Sample]:
        asked = zip(work_unit.problems, work_unit.requests, completions, strict=True)
        samples = [sample_of(problem, request, completion, self._tokenizer) for problem, request, completion in asked]
        if self._shape is None or work_unit.key.round == EVALUATION_ROUND:
            return samples
        sampled = zip(samples, work_unit.requests, completions, strict=True)
        return [replace(sample, blocks=self._blocks(request, completion)) for sample, request, completion in sampled]

    def _blocks(self, request: Request, completion: Completion) -> tuple[TextBlock, ...]:
        """Return the sampler's blocks of a completion's text."""
        assert self._shape is not None
        num_prompt, params = len(request.prompt_ids), request.params
        canvas = Canvas(
            prompt_length=num_prompt,
            gen_length=params.gen_length,
            block_length=params.block_length,
            is_block_causal=self._shape.is_block_causal,
        )
        ends = [0]
        while ends[-1] < completion.num_tokens:
            ends.append(min(canvas.block_end(num_prompt + ends[-1]) - num_prompt, completion.num_tokens))
        decode, token_ids = self._tokenizer.decode, completion.token_ids.tolist()
        return tuple(TextBlock(decode(token_ids[begin:end]), end) for begin, end in pairwise(ends))


def sample_of(
    problem: Problem,
    request: Request | RenoisingRequest,
    completion: Completion | RenoisedCompletion,
    tokenizer: ChatTokenizer,
) -> Sample:
    """Make the grader's input from a completion, with its text up to the end-of-text token."""
    return Sample(
        problem=problem,
        text=tokenizer.decode(completion.token_ids[: completion.num_tokens].tolist()),
        num_tokens=completion.num_tokens,
        num_forwards=completion.num_forwards,
        max_tokens=request.params.gen_length,
        is_truncated=completion.finish_reason is FinishReason.LENGTH,
    )
