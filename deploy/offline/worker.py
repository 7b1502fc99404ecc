"""Worker of offline work: samples and grades batches with one checkpoint, as a plain class."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from actors.grader import sample_of
from deploy.offline.item import Answer, AnsweredBatch, AnyCompletion, Batch, Item, answer_of
from deploy.offline.policy import load_sampler
from learner.model.checkpoint_files import open_tokenizer
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Grader, RewardConfig, Sample, TaskConfig
from rollout.config import EngineConfig
from rollout.renoising.sampler import AnySampler


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Configuration of a worker."""

    checkpoint: Path | None
    """Directory of the checkpoint; None for a worker that only grades."""
    engine: EngineConfig = field(default_factory=EngineConfig)
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

    @property
    def _checkpoint(self) -> Path:
        assert self._config.checkpoint is not None, "items with requests come with a checkpoint"
        return self._config.checkpoint

    @cached_property
    def _sampler(self) -> AnySampler:
        if self._config.device == "cpu":
            torch.set_num_threads(self._config.num_threads)
        return load_sampler(self._checkpoint, self._config.device, self._config.engine)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return open_tokenizer(self._checkpoint)

    def answer(self, batch: Batch) -> AnsweredBatch:
        """Denoise the requests of a batch, and grade it if it has a task.

        Raises ValueError or OSError as `load_policy`, and FloatingPointError if the policy's weights are invalid.
        """
        if not batch.has_room:
            return AnsweredBatch(index=batch.index, answers=tuple(map(_without_room, batch.items)))
        sampler = None if batch.requests[0] is None else self._sampler
        began = time.perf_counter()
        completions = [] if sampler is None else sampler.generate(batch.requests)
        answers = () if batch.task is None else self._graded(batch, batch.task, completions)
        seconds = time.perf_counter() - began
        return AnsweredBatch(index=batch.index, completions=completions, answers=answers, seconds=seconds)

    def _graded(self, batch: Batch, task: TaskConfig, completions: Sequence[AnyCompletion]) -> tuple[Answer, ...]:
        if completions:
            samples = [self._sample(batch, *pair) for pair in zip(batch.items, completions, strict=True)]
        else:
            samples = list(map(_sample_of_text, batch.items))
        grades = self._grader(task).evaluate(samples)
        graded = zip(samples, batch.items, grades, strict=True)
        return tuple(answer_of(sample, item.sample, grade) for sample, item, grade in graded)

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


def _sample_of_text(item: Item) -> Sample:
    assert item.problem is not None, "it is graded"
    return Sample(problem=item.problem, text=item.text, num_tokens=0, num_forwards=0, max_tokens=0, is_truncated=False)


def _without_room(item: Item) -> Answer:
    """Return the wrong answer to a problem whose prompt leaves no room for a completion."""
    _, request = item.asked
    detail = f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a completion"
    grade = Grade(reward=0.0, parts={}, correct=False, detail=detail)
    return replace(answer_of(_sample_of_text(item), item.sample, grade), has_room=False)
