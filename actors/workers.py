"""The pools' actors: ordinary classes, made Ray actors where the pools are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actors.messages import Generation, Portion, PortionSummary, ScoredPortion
from actors.weights import fetch_from
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Outcome, Problem, Task, TaskConfig, make_task
from rollout.config import EngineConfig
from rollout.request import Completion
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

    def ready(self) -> bool:
        """Answers once the actor is up."""
        return True

    def generate(self, generation: Generation, portion: Portion) -> tuple[list[Completion], int]:
        """Completions of a portion by exactly those weights, fetched and verified where they are not held.

        Returns them and their number: a caller that only needs to know that they are there waits for the number.
        """
        if generation != self._generation:
            self._generation = None
            self._policy.load_state_dict(fetch_from(self._store, generation.version, _FETCH_TIMEOUT_S))
            self._generation = generation
        completions = Sampler(self._policy, generation.version, self._engine).generate(portion.requests)
        return completions, len(completions)


class GraderWorker:
    """Turns completions into text and grades them. One grader serves reward and evaluation."""

    def __init__(self, task: TaskConfig, tokenizer: Path) -> None:
        self._task = make_task(task)
        self._tokenizer = ChatTokenizer(tokenizer)

    def ready(self) -> bool:
        """Answers once the actor is up."""
        return True

    def grade(self, portion: Portion, completions: list[Completion]) -> tuple[ScoredPortion, PortionSummary]:
        """Grade the text of each completion up to its end of text; what follows it is not the policy's answer."""
        texts = [
            self._tokenizer.decode(completion.token_ids[: completion.num_tokens].tolist()) for completion in completions
        ]
        failures: list[str] = []
        grades = tuple(
            grade_or_error(self._task, problem, text, failures)
            for problem, text in zip(portion.problems, texts, strict=True)
        )
        scored = ScoredPortion(portion=portion, completions=tuple(completions), grades=grades)
        summary = PortionSummary(
            grades=grades,
            texts=tuple(texts),
            num_tokens=tuple(completion.num_tokens for completion in completions),
            step_maps=tuple(tuple(completion.step_map.tolist()) for completion in completions),
            policy_versions=tuple(completion.policy_version for completion in completions),
            failures=tuple(dict.fromkeys(failures)),
        )
        return scored, summary


def grade_or_error(task: Task, problem: Problem, text: str, failures: list[str]) -> Grade:
    """The grade, or a counted error: the named boundary at which a grader's failure becomes data.

    What failed is added to `failures`.
    """
    try:
        return task.grade(problem, text)
    except Exception as error:
        failures.append(f"the grader failed on {problem.problem_id}: {type(error).__name__}: {error}")
        return Grade(reward=0.0, parts={}, correct=False, outcome=Outcome.ERROR)
