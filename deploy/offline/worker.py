"""Worker of offline work: samples and grades batches with one checkpoint, as a plain class."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from actors.grader import sample_of
from deploy.offline.item import Answer, AnsweredBatch, AnyCompletion, Batch, CompletedBatch, Item, answer_of
from deploy.offline.policy import load_sampler
from learner.model.checkpoint_files import open_tokenizer
from learner.model.tokenizer import ChatTokenizer
from rewards import Grader, Outcome, RewardConfig, Sample, TaskConfig
from rollout.config import EngineConfig
from rollout.renoising.sampler import AnySampler


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Configuration of a worker."""

    checkpoint: Path
    """Directory of the checkpoint."""
    engine: EngineConfig
    """Settings of the sampling engine."""
    device: str = "cpu"
    """Device: `cpu`, `cuda`, `cuda:1`. A pool chooses it."""
    num_threads: int = 1
    """Threads of a worker on the CPU. A pool on this machine chooses it."""


class Worker:
    """Worker with one policy, and a grader for each task."""

    def __init__(self, config: WorkerConfig) -> None:
        """Store the config. The policy is loaded by the first `answer`, so that the caller receives loading errors."""
        self._config = config
        self._graders: dict[str, Grader] = {}

    @cached_property
    def _sampler(self) -> AnySampler:
        if self._config.device == "cpu":
            torch.set_num_threads(self._config.num_threads)
        return load_sampler(self._config.checkpoint, self._config.device, self._config.engine)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return open_tokenizer(self._config.checkpoint)

    def answer(self, batch: Batch) -> AnsweredBatch:
        """Denoise and grade a batch.

        Raises ValueError or OSError as `load_policy`, and FloatingPointError if the policy's weights are invalid.
        """
        if not batch.has_room:
            return _unanswered(batch)
        assert batch.task is not None, "it is graded"
        sampler = self._sampler
        began = time.perf_counter()
        completions: Sequence[AnyCompletion] = sampler.generate(batch.requests)
        samples = [self._sample(batch, *pair) for pair in zip(batch.items, completions, strict=True)]
        grades = self._grader(batch.task).evaluate(samples)
        graded = zip(samples, batch.items, grades, strict=True)
        answers = tuple(answer_of(sample, item.sample, grade) for sample, item, grade in graded)
        return AnsweredBatch(index=batch.index, answers=answers, seconds=time.perf_counter() - began)

    def complete(self, batch: Batch) -> CompletedBatch:
        """Denoise a batch. Raises as `answer`."""
        return CompletedBatch(index=batch.index, completions=self._sampler.generate(batch.requests))

    def _sample(self, batch: Batch, item: Item, completion: AnyCompletion) -> Sample:
        problem, request = item.asked
        sample = sample_of(problem, request, completion, self._tokenizer)
        if not batch.grades_whole_canvas:
            return sample
        # The sampler ignored stop ids, but the canvas may contain one.
        ids = completion.token_ids[: request.params.gen_length].tolist()
        ends = [place for place, token in enumerate(ids) if token in self._sampler.model.config.stop_ids]
        num_tokens = ends[0] + 1 if ends else len(ids)
        return replace(sample, text=self._tokenizer.decode_all(ids), num_tokens=num_tokens, is_truncated=not ends)

    def _grader(self, task: TaskConfig) -> Grader:
        key = task.model_dump_json()
        if key not in self._graders:
            self._graders[key] = Grader(task, RewardConfig())
        return self._graders[key]


def _unanswered(batch: Batch) -> AnsweredBatch:
    """Return wrong answers for problems whose prompts leave no room for a completion."""
    asked = [(*item.asked, item.sample) for item in batch.items]
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
            detail=f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a completion",
            num_tokens=0,
            num_forwards=0,
            is_truncated=False,
            has_room=False,
        )
        for problem, request, sample in asked
    )
    return AnsweredBatch(index=batch.index, answers=answers, seconds=0.0)
