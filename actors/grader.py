"""The pools' graders: an ordinary class, made a Ray actor where the pools are built. It needs no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from actors.messages import EVALUATION_ROUND, Portion, PortionSummary, ScoredPortion
from actors.packed import Completions
from learner.model.tokenizer import ChatTokenizer
from rewards import Grader, Problem, RewardConfig, Sample, TaskConfig
from rollout.renoising.request import RenoisedCompletion, RenoisingRequest
from rollout.request import Completion, FinishReason, Request


class GraderWorker:
    """Turns completions into text and grades them. One grader serves reward and evaluation."""

    def __init__(self, task: TaskConfig, reward: RewardConfig, tokenizer: Path) -> None:
        """Raises ValueError when a term of the reward cannot work on this machine."""
        self._grader = Grader(task, reward)
        self._tokenizer = ChatTokenizer(tokenizer)

    def ready(self) -> int:
        """Answers once the actor is up, with its process id: another one is a restart."""
        return os.getpid()

    def grade(self, portion: Portion, completions: Sequence[Completion]) -> tuple[ScoredPortion, PortionSummary]:
        """Grade the text of each completion up to its end of text; what follows it is not the policy's answer.

        An evaluation is graded by the task alone. Raises RewardUnavailableError when what a term of the reward asks
        does not answer.
        """
        samples = self._samples(portion, completions)
        is_evaluation = portion.key.round == EVALUATION_ROUND
        grades = self._grader.evaluate(samples) if is_evaluation else self._grader.grade(samples)
        texts = [sample.text for sample in samples]
        summary = PortionSummary.of(completions, grades, texts, self._grader.take_costs())
        return ScoredPortion(portion=portion, completions=Completions(completions), summary=summary), summary

    def _samples(self, portion: Portion, completions: Sequence[Completion]) -> list[Sample]:
        asked = zip(portion.problems, portion.requests, completions, strict=True)
        return [sample_of(problem, request, completion, self._tokenizer) for problem, request, completion in asked]


def sample_of(
    problem: Problem,
    request: Request | RenoisingRequest,
    completion: Completion | RenoisedCompletion,
    tokenizer: ChatTokenizer,
) -> Sample:
    """What is graded of a completion: its text up to its end of text."""
    return Sample(
        problem=problem,
        text=tokenizer.decode(completion.token_ids[: completion.num_tokens].tolist()),
        num_tokens=completion.num_tokens,
        num_forwards=completion.num_forwards,
        max_tokens=request.params.gen_length,
        is_truncated=completion.finish_reason is FinishReason.LENGTH,
    )
