"""Grader worker: decodes completions and grades them.

An ordinary class, which `actors/cluster.py` makes a Ray actor. It needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.columnar import Completions
from actors.messages import EVALUATION_ROUND, ScoredWorkUnit, WorkUnit, WorkUnitSummary
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Grader, Problem, RewardConfig, Sample, TaskConfig
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
        # Splitting texts into blocks takes time, and only some terms receive them.
        takes_blocks = any(term.takes_arguments for term in reward.terms.values())
        self._shape = load_config(tokenizer) if takes_blocks else None

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
        step_rewards = None
        if any(completion.step_answers is not None for completion in completions):
            step_rewards = self._step_rewards(work_unit.requests, completions, samples, grades)
            # Of greedy answers the learner needs the rewards alone.
            completions = [
                completion if request.samples_step_answers else replace(completion, step_answers=None)
                for request, completion in zip(work_unit.requests, completions, strict=True)
            ]
        texts = [sample.text for sample in samples]
        summary = WorkUnitSummary.of(completions, grades, texts, self._grader.take_costs())
        scored = ScoredWorkUnit(
            work_unit=work_unit, completions=Completions(completions), summary=summary, step_rewards=step_rewards
        )
        return scored, summary

    def _step_rewards(
        self,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        samples: Sequence[Sample],
        grades: Sequence[Grade],
    ) -> tuple[NDArray[np.float32], ...]:
        """Grade the completions' step answers as if each were its completion, equal texts of a completion once.

        Returns the rewards of each completion by denoise step, NaN where there is no answer or none that can be graded.
        """
        of_text = {(row, sample.text): grade for row, (sample, grade) in enumerate(zip(samples, grades, strict=True))}
        asked: dict[tuple[int, str], Sample] = {}
        rewards, texts = [], []
        for row, (request, completion, sample) in enumerate(zip(requests, completions, samples, strict=True)):
            rewards.append(np.full(int(completion.step_map.max(initial=-1)) + 1, np.nan, dtype=np.float32))
            for step, answer in self._step_samples(request, completion, sample):
                texts.append((row, step, answer.text))
                if (row, answer.text) not in of_text:
                    asked[row, answer.text] = answer
        of_text |= zip(asked, self._grader.grade([*asked.values()]), strict=True)
        for row, step, text in texts:
            if of_text[row, text].counts:
                rewards[row][step] = of_text[row, text].reward
        return tuple(rewards)

    def _step_samples(self, request: Request, completion: Completion, sample: Sample) -> list[tuple[int, Sample]]:
        """Return the denoise step and the grader's input of each step answer; `sample` is that of the completion."""
        answers = completion.step_answers
        if answers is None:
            return []
        return [
            (
                int(step),
                replace(
                    sample,
                    text=self._tokenizer.decode(token_ids[:num_tokens].tolist()),
                    num_tokens=int(num_tokens),
                    is_truncated=not ended,
                    blocks=self._blocks(request, token_ids[:num_tokens].tolist()) if sample.blocks else (),
                ),
            )
            for step, token_ids, num_tokens, ended in zip(
                answers.steps, answers.token_ids, answers.num_tokens, answers.ended, strict=True
            )
        ]

    def _samples(self, work_unit: WorkUnit, completions: Sequence[Completion]) -> list[Sample]:
        asked = zip(work_unit.problems, work_unit.requests, completions, strict=True)
        samples = [sample_of(problem, request, completion, self._tokenizer) for problem, request, completion in asked]
        if self._shape is None or work_unit.key.round == EVALUATION_ROUND:
            return samples
        sampled = zip(samples, work_unit.requests, completions, strict=True)
        return [
            replace(sample, blocks=self._blocks(request, completion.token_ids[: completion.num_tokens].tolist()))
            for sample, request, completion in sampled
        ]

    def _blocks(self, request: Request, token_ids: Sequence[int]) -> tuple[TextBlock, ...]:
        """Return the sampler's blocks of a text in tokens."""
        assert self._shape is not None
        num_prompt, params = len(request.prompt_ids), request.params
        canvas = Canvas(
            prompt_length=num_prompt,
            gen_length=params.gen_length,
            block_length=params.block_length,
            is_block_causal=self._shape.is_block_causal,
        )
        ends = [0]
        while ends[-1] < len(token_ids):
            ends.append(min(canvas.block_end(num_prompt + ends[-1]) - num_prompt, len(token_ids)))
        return tuple(TextBlock(self._tokenizer.decode(token_ids[begin:end]), end) for begin, end in pairwise(ends))


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
