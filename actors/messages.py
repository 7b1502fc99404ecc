"""The types that travel between the actors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewards import Grade, Problem
from rollout.request import Completion, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Names the weights that a portion is sampled from.

    A learner that restarts makes versions again, and they may be other weights: the number alone would let a sampler
    keep what it has.
    """

    version: int
    """The policy version."""
    learner_start: int
    """How often the learner group had started when it was published."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPortion:
    """A portion with its completions and grades: what the learner trains on."""

    portion: Portion
    """What was asked."""
    completions: tuple[Completion, ...]
    """What was sampled, in the order of the requests."""
    grades: tuple[Grade, ...]
    """What each is worth."""


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
