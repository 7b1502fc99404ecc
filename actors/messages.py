"""Message types between the actors: work units, completions, summaries and weight versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rewards import Grade, Outcome, Problem
from rollout.request import Completion, Request

EVALUATION_ROUND = -1
"""Round index of work units that belong to an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsId:
    """Identity of the weights that a work unit is sampled from.

    A restarted learner makes versions again, possibly with different weights. By the number alone a sampler would keep
    its old ones. The digest tells them apart, whatever state each process has kept.
    """

    version: int
    """The policy version."""
    digest: str
    """The digest of its manifest."""


class Next(StrEnum):
    """The coordinator's answer to a request of the learner."""

    CONTINUE = "continue"
    """Continue: the request is done."""
    PUBLISH = "publish"
    """The weight store lost the newest version: publish it again, then repeat the request."""
    STOP = "stop"
    """A stop was requested: write a checkpoint and end."""
    REPORT = "report"
    """The coordinator has restarted and lacks the last round's summaries: report them, then repeat the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRound:
    """A round that the learner has trained on."""

    round: int
    """Its index."""
    weights_id: WeightsId
    """The version that it produced, already published."""
    values: Mapping[str, Any]
    """The learner's metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnitKey:
    """Key of a work unit: whole groups of one round (or one evaluation) that are sampled together.

    The recipe fixes what a work unit contains, independently of which sampler is free. The last bits of a logit depend
    on the batch, so a fixed composition is what makes a repeated run equal to the first.
    """

    round: int
    """The round, or -1 for an evaluation."""
    index: int
    """Its position in the round."""

    @property
    def is_of_evaluation(self) -> bool:
        """Whether it belongs to an evaluation instead of a round."""
        return self.round < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnit:
    """Work unit of a sampler: requests that are sampled together."""

    key: WorkUnitKey
    """Its round and position."""
    problems: tuple[Problem, ...]
    """The problem of each request."""
    group_ids: tuple[int, ...]
    """The group of each request, numbered within the round."""
    requests: tuple[Request, ...]
    """The requests to the sampler."""
    is_long: bool = False
    """Whether its prompts exceed the limit of the rounds, as those of an evaluation may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnitSummary:
    """The part of a scored work unit that the coordinator keeps; the tensors bypass it."""

    grades: tuple[Grade, ...]
    """The grade of each completion."""
    texts: tuple[str, ...]
    """The text of each completion."""
    num_tokens: tuple[int, ...]
    """Tokens of each completion."""
    step_maps: tuple[tuple[int, ...], ...]
    """The denoise step of each slot of each completion."""
    num_forwards: tuple[int, ...]
    """Forwards of each completion, including steps of token editing that wrote nothing."""
    policy_versions: tuple[int, ...]
    """The version that sampled each completion."""
    failures: tuple[str, ...]
    """Distinct errors of the grader."""
    costs: Mapping[str, float]
    """What the reward's terms spent on it, by `TERM/WHAT`, including the spending of a failed attempt."""

    @classmethod
    def of(
        cls,
        completions: Sequence[Completion],
        grades: Sequence[Grade],
        texts: Sequence[str],
        costs: Mapping[str, float],
    ) -> Self:
        """Summarize completions with their grades and texts."""
        failures = [grade.detail for grade in grades if grade.outcome is Outcome.ERROR]
        return cls(
            grades=tuple(grades),
            texts=tuple(texts),
            num_tokens=tuple(completion.num_tokens for completion in completions),
            step_maps=tuple(tuple(completion.step_map.tolist()) for completion in completions),
            num_forwards=tuple(completion.num_forwards for completion in completions),
            policy_versions=tuple(completion.policy_version for completion in completions),
            failures=tuple(dict.fromkeys(failures)),
            costs=costs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredWorkUnit:
    """Work unit with its completions and grades: the learner's training data."""

    work_unit: WorkUnit
    """The work unit."""
    completions: tuple[Completion, ...]
    """Its completions, in the order of the requests."""
    summary: WorkUnitSummary
    """Grades and statistics for the coordinator; reported again from here if the coordinator restarts."""
    step_rewards: tuple[NDArray[np.float32], ...] | None = None
    """The rewards of each completion's step answers by denoise step, NaN where nothing was graded; None if no request
    asks for any (`Request.num_step_answers`)."""

    @property
    def grades(self) -> tuple[Grade, ...]:
        """The grade of each completion."""
        return self.summary.grades
