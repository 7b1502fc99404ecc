"""The pools' actors: ordinary classes, made Ray actors where the pools are built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actors.messages import Generation, Portion, PortionSummary, ScoredPortion
from actors.packed import Completions
from actors.plan import EVALUATION_ROUND
from actors.weights import fetch_from
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from rewards import Grader, RewardConfig, Sample, TaskConfig
from rollout.config import EngineConfig
from rollout.request import Completion, FinishReason
from rollout.sampler import Sampler

_FETCH_TIMEOUT_S = 120.0


class SamplerWorker:
    """Holds one policy version and samples from it. Without weights it takes none on faith: it fetches them first."""

    def __init__(self, checkpoint: Path, store: Any, device: str, engine: EngineConfig) -> None:
        """Make an empty policy of the checkpoint's shape; `store` is the weight store's handle."""
        torch.set_num_threads(1)
        self._policy = load_policy(checkpoint, engine.torch_dtype).to(device)
        self._engine = engine
        self._store = store
        self._generation: Generation | None = None

    def ready(self) -> int:
        """Answers once the actor is up, with its process id: another one is a restart."""
        return os.getpid()

    def generate(self, generation: Generation, portion: Portion) -> tuple[Completions, int]:
        """Completions of a portion by exactly those weights, fetched and verified where they are not held.

        Returns them and their number: a caller that only needs to know that they are there waits for the number.
        """
        if generation != self._generation:
            self._generation = None
            weights = fetch_from(self._store, generation.version, _FETCH_TIMEOUT_S, generation.digest)
            self._policy.load_state_dict(weights)
            self._generation = generation
        completions = Sampler(self._policy, generation.version, self._engine).generate(portion.requests)
        return Completions(completions), len(completions)


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
        return [
            Sample(
                problem=problem,
                text=self._tokenizer.decode(completion.token_ids[: completion.num_tokens].tolist()),
                num_tokens=completion.num_tokens,
                num_forwards=completion.num_forwards,
                max_tokens=request.params.gen_length,
                is_truncated=completion.finish_reason is FinishReason.LENGTH,
            )
            for problem, request, completion in zip(portion.problems, portion.requests, completions, strict=True)
        ]
