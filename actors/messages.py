"""The types that travel between the actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from rewards import Grade, Outcome, Problem
from rollout.request import Completion, Request

EVALUATION_ROUND = -1
"""The round of portions that only measure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Names the weights that a portion is sampled from.

    A learner that restarts makes versions again, and they may be other weights: the number alone would let a sampler
    keep what it has. The digest holds whichever process remembers or forgets what.
    """

    version: int
    """The policy version."""
    digest: str
    """The digest of its manifest."""


class Next(StrEnum):
    """What the coordinator asks of the learner."""

    GO_ON = "go on"
    """Here is what it waited for."""
    PUBLISH = "publish"
    """The weight store has lost the newest version: publish it again, and ask again."""
    STOP = "stop"
    """Somebody wants the run to stop: write a checkpoint, and end."""
    TELL = "tell"
    """The coordinator has restarted and does not know what was trained on: tell it all of that, and ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRound:
    """A round that the learner has trained on."""

    round: int
    """The round."""
    generation: Generation
    """What it gave, which is published."""
    values: Mapping[str, Any]
    """What the learner measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortionKey:
    """Names a portion: whole groups of one round (or one evaluation) that are sampled together.

    What a portion holds is fixed by the recipe, never by who is free: the last bits of a logit depend on the batch,
    so a fixed composition is what makes a repeated run equal to the first.
    """

    round: int
    """The round, or -1 for an evaluation."""
    index: int
    """Its place in the round."""

    @property
    def is_of_evaluation(self) -> bool:
        """Whether it is of an evaluation and not of a round."""
        return self.round < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """The work of one portion."""

    key: PortionKey
    """Its name."""
    problems: tuple[Problem, ...]
    """The problem of each request."""
    group_ids: tuple[int, ...]
    """The group, counted in the round, of each request."""
    requests: tuple[Request, ...]
    """What the sampler is asked for."""
    is_long: bool = False
    """Whether its prompts are longer than those of the rounds, as those of an evaluation may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortionSummary:
    """The little of a scored portion that the coordinator keeps; the tensors go past it."""

    grades: tuple[Grade, ...]
    """The grade of each completion."""
    texts: tuple[str, ...]
    """The text of each completion."""
    num_tokens: tuple[int, ...]
    """Tokens of each completion."""
    step_maps: tuple[tuple[int, ...], ...]
    """The denoise step of each slot of each completion."""
    policy_versions: tuple[int, ...]
    """The version that sampled each completion."""
    failures: tuple[str, ...]
    """What went wrong in the grader, if anything did."""
    costs: Mapping[str, float]
    """What the terms of the reward spent on it, by `TERM/WHAT`; after a failed try also what that spent."""

    @classmethod
    def of(
        cls,
        completions: Sequence[Completion],
        grades: Sequence[Grade],
        texts: Sequence[str],
        costs: Mapping[str, float],
    ) -> Self:
        """Of completions with their grades and texts."""
        failures = [grade.detail for grade in grades if grade.outcome is Outcome.ERROR]
        return cls(
            grades=tuple(grades),
            texts=tuple(texts),
            num_tokens=tuple(completion.num_tokens for completion in completions),
            step_maps=tuple(tuple(completion.step_map.tolist()) for completion in completions),
            policy_versions=tuple(completion.policy_version for completion in completions),
            failures=tuple(dict.fromkeys(failures)),
            costs=costs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPortion:
    """A portion with its completions and grades: what the learner trains on."""

    portion: Portion
    """What was asked."""
    completions: tuple[Completion, ...]
    """What was sampled, in the order of the requests."""
    summary: PortionSummary
    """Their grades, and the rest that the coordinator is told. A coordinator that restarted is told again from here."""

    @property
    def grades(self) -> tuple[Grade, ...]:
        """What each completion is worth."""
        return self.summary.grades
