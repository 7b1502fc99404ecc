"""Evaluation worker: samples and grades batches with one checkpoint, as a plain class."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from actors.grader import sample_of
from deploy.offline.evaluation.problems import EvaluationBatch
from learner.hardware import indexed_device
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import open_tokenizer
from learner.model.renoising.config import is_renoising
from learner.model.renoising.policy import load_renoising_policy
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Grader, Outcome, RewardConfig, Sample, TaskConfig
from rollout.config import EngineConfig
from rollout.renoising.request import RenoisedCompletion
from rollout.renoising.sampler import RenoisingSampler
from rollout.request import Completion
from rollout.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Configuration of a worker."""

    checkpoint: Path
    """Directory of the checkpoint."""
    engine: EngineConfig
    """Settings of the sampling engine."""
    device: str
    """Device: `cpu`, `cuda`, `cuda:1`."""
    num_threads: int
    """Threads of a worker on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Completion with its grade: a line of the evaluation's record, which `d1 grade` reads too."""

    problem_id: str
    sample: int
    question: str
    generation: str
    ground_truth: str
    answer: str | None
    correct: bool
    num_right: int
    num_items: int
    outcome: str
    detail: str
    num_tokens: int
    num_forwards: int
    is_truncated: bool
    has_room: bool = True
    """Whether the prompt left room for a completion. If not, nothing was sampled."""


def answer_of(sample: Sample, number: int, grade: Grade) -> Answer:
    """Return the answer for a graded completion; `number` is its sample index within the problem."""
    return Answer(
        problem_id=sample.problem.problem_id,
        sample=number,
        question=sample.problem.messages[-1].content,
        generation=sample.text,
        ground_truth=sample.problem.answer,
        answer=grade.answer,
        correct=grade.correct,
        num_right=grade.score[0],
        num_items=grade.score[1],
        outcome=grade.outcome.value,
        detail=grade.detail,
        num_tokens=sample.num_tokens,
        num_forwards=sample.num_forwards,
        is_truncated=sample.is_truncated,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredBatch:
    """Completed batch."""

    index: int
    """Index of the batch in the cell."""
    answers: tuple[Answer, ...]
    """Answers, in order of the requests."""
    seconds: float
    """Time of the worker, in seconds."""


class Worker:
    """Worker with one policy, and a grader for each task."""

    def __init__(self, config: WorkerConfig) -> None:
        """Store the config. The policy is loaded by the first `answer`, so that the caller receives loading errors."""
        self._config = config
        self._graders: dict[str, Grader] = {}

    @cached_property
    def _sampler(self) -> Any:
        """`Sampler` or `RenoisingSampler`; their request types differ."""
        directory, engine, device = self._config.checkpoint, self._config.engine, indexed_device(self._config.device)
        if device.type == "cpu":
            torch.set_num_threads(self._config.num_threads)
        if is_renoising(directory):
            return RenoisingSampler(load_renoising_policy(directory, engine.torch_dtype).to(device), 0)
        return Sampler(load_policy(directory, engine.torch_dtype, device), 0, engine)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return open_tokenizer(self._config.checkpoint)

    def answer(self, batch: EvaluationBatch) -> AnsweredBatch:
        """Denoise and grade a batch.

        Raises ValueError or OSError as `load_policy`, and FloatingPointError if the policy's weights are invalid.
        """
        if not batch.has_room:
            return _unanswered(batch)
        sampler = self._sampler
        began = time.perf_counter()
        completions = sampler.generate(batch.requests)
        samples = [self._sample(batch, index, completion) for index, completion in enumerate(completions)]
        grades = self._grader(batch.task).evaluate(samples)
        numbered = zip(batch.samples, samples, grades, strict=True)
        answers = tuple(answer_of(sample, number, grade) for number, sample, grade in numbered)
        return AnsweredBatch(index=batch.index, answers=answers, seconds=time.perf_counter() - began)

    def _sample(self, batch: EvaluationBatch, index: int, completion: Completion | RenoisedCompletion) -> Sample:
        sample = sample_of(batch.problems[index], batch.requests[index], completion, self._tokenizer)
        if not batch.grades_whole_canvas:
            return sample
        # The sampler ignored stop ids, but the canvas may contain one.
        ids = completion.token_ids[: batch.requests[index].params.gen_length].tolist()
        ends = [place for place, token in enumerate(ids) if token in self._sampler.model.config.stop_ids]
        num_tokens = ends[0] + 1 if ends else len(ids)
        return replace(sample, text=self._tokenizer.decode_all(ids), num_tokens=num_tokens, is_truncated=not ends)

    def _grader(self, task: TaskConfig) -> Grader:
        key = task.model_dump_json()
        if key not in self._graders:
            self._graders[key] = Grader(task, RewardConfig())
        return self._graders[key]


def _unanswered(batch: EvaluationBatch) -> AnsweredBatch:
    """Return wrong answers for problems whose prompts leave no room for a completion."""
    lengths = [len(request.prompt_ids) for request in batch.requests]
    answers = tuple(
        Answer(
            problem_id=problem.problem_id,
            sample=sample,
            question=problem.messages[-1].content,
            generation="",
            ground_truth=problem.answer,
            answer=None,
            correct=False,
            num_right=0,
            num_items=1,
            outcome=Outcome.GRADED.value,
            detail=f"a prompt of {length} tokens leaves no room for a completion",
            num_tokens=0,
            num_forwards=0,
            is_truncated=False,
            has_room=False,
        )
        for problem, sample, length in zip(batch.problems, batch.samples, lengths, strict=True)
    )
    return AnsweredBatch(index=batch.index, answers=answers, seconds=0.0)
