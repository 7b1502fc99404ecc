"""Compatibility checks of objective, estimator and policy lag that all objectives share."""

from __future__ import annotations

from learner.estimators.base import Estimator
from learner.estimators.groupings import Level
from learner.objectives.base import Objective
from learner.objectives.units import Normalize


def shared_incompatibility(
    objective: Objective,
    estimator: Estimator,
    max_staleness: int,
    *,
    own: str | None = None,
    takes_draws: bool = False,
    takes_order: bool = False,
    takes_stale: bool = False,
) -> str | None:
    """Return why an objective cannot be combined with an estimator, or with off-policy completions; None if it can.

    Args:
        objective: the objective.
        estimator: the source of its likelihoods.
        max_staleness: maximum age of a completion in policy versions.
        own: the result of the objective's own check.
        takes_draws: whether its units are draws, each a separate estimate.
        takes_order: whether it uses the order in which slots were committed.
        takes_stale: whether it corrects for off-policy completions, or need not.
    """
    facts = estimator.facts
    if facts.has_separate_draws != takes_draws:
        return "objective linear_bound and estimator elbo with values: draws need each other"
    if own is not None:
        return own
    if max_staleness and not takes_stale:
        return (
            f"max_staleness is {max_staleness}: completions of an older policy are corrected for by what the "
            "sampler recorded, so that objective.old must be sampler or objective.max_sampler_ratio set (with "
            "estimator trajectory, steps_per_segment: 1 and law: sampler), or the objective trajectory_balance, or "
            "max_staleness 0"
        )
    if objective.level is Level.CANVAS_TOKEN and not facts.parts_are_canvases:
        return (
            f"objective.level canvas_token is for estimators sampled_states and predictions, which score a token on "
            f"several canvases, and not for {estimator.name}; take level: token"
        )
    if facts.scores_order != takes_order:
        return "objective.order_temperature and estimator.scores_order need each other"
    return _part_incompatibility(objective, estimator)


def _part_incompatibility(objective: Objective, estimator: Estimator) -> str | None:
    """Return why a mean over draws or segments is impossible; None if it is possible, or not configured."""
    facts, level = estimator.facts, objective.level
    is_split = {Level.TOKEN: facts.splits_tokens, Level.ROW: facts.splits_rows}.get(level, False)
    if objective.normalize_by is not Normalize.PART or not is_split:
        return None
    what = "token" if level is Level.TOKEN else "completion"
    return (
        f"objective.normalize_by is part, and estimator {estimator.name} scores a {what} in several draws or "
        "segments, so that it belongs to no single one; take round, group or row"
    )
