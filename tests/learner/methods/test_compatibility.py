"""Compatibility checks of objectives, which depend only on the facts of estimator and sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.estimators import Estimator, EstimatorFacts, RowValue, SamplerFacts, TrajectoryConfig
from learner.objectives import (
    ClippedRatioConfig,
    DistributionMatchingConfig,
    LinearBoundConfig,
    Objective,
    PreferenceConfig,
    SandwichConfig,
    TrajectoryBalanceConfig,
    WeightedLikelihoodConfig,
)


@dataclass(frozen=True)
class _Unheard:
    """An estimator whose name no objective knows."""

    facts: EstimatorFacts
    name: str = "unheard_of"


_EVERY: list[Objective] = [
    ClippedRatioConfig(),
    WeightedLikelihoodConfig(),
    SandwichConfig(),
    LinearBoundConfig(),
    PreferenceConfig(),
    DistributionMatchingConfig(),
    TrajectoryBalanceConfig(),
]


@pytest.mark.parametrize(
    ("facts", "max_staleness", "takers"),
    [
        (EstimatorFacts(), 0, {"clipped_ratio", "weighted_likelihood"}),
        (
            EstimatorFacts(row_value=RowValue.LOG_LIKELIHOOD),
            0,
            {"clipped_ratio", "weighted_likelihood", "trajectory_balance"},
        ),
        (
            EstimatorFacts(row_value=RowValue.ELBO),
            0,
            {"clipped_ratio", "weighted_likelihood", "trajectory_balance", "preference", "distribution_matching"},
        ),
        (EstimatorFacts(row_value=RowValue.MASKED_MEAN), 0, {"clipped_ratio", "weighted_likelihood"}),
        (
            EstimatorFacts(row_value=RowValue.MASKED_MEAN, splits_rows=True),
            0,
            {"clipped_ratio", "weighted_likelihood", "sandwich"},
        ),
        (EstimatorFacts(row_value=RowValue.LOG_LIKELIHOOD), 1, {"trajectory_balance"}),
        (EstimatorFacts(row_value=RowValue.ELBO, has_separate_draws=True), 0, {"linear_bound"}),
        (EstimatorFacts(scores_order=True), 0, set()),
    ],
)
def test_objectives_check_estimators_and_staleness(facts: EstimatorFacts, max_staleness: int, takers: set[str]) -> None:
    estimator = cast("Estimator", _Unheard(facts))
    assert {one.name for one in _EVERY if one.incompatibility(estimator, max_staleness) is None} == takers


@pytest.mark.parametrize(
    ("facts", "max_staleness", "is_refused"),
    [
        (EstimatorFacts(matches_sampler_record=True), 3, False),
        (EstimatorFacts(matches_sampler_record=True), 0, False),
        (EstimatorFacts(), 0, True),
    ],
)
def test_ratios_to_recorded_log_probs_need_replayable_states(
    facts: EstimatorFacts, max_staleness: int, is_refused: bool
) -> None:
    why = ClippedRatioConfig(old="sampler").incompatibility(cast("Estimator", _Unheard(facts)), max_staleness)
    assert (why is not None and "not comparable with the recorded ones" in why) == is_refused == (why is not None)


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (SamplerFacts(has_reproducible_logps=False), "does not record the likelihoods that replay"),
        (SamplerFacts(has_exact_logps=False), "does not record the likelihoods that replay"),
        (SamplerFacts(temperature=0), "at rollout.sampling.temperature 0 nothing is drawn"),
    ],
)
def test_only_ratios_to_recorded_log_probs_depend_on_the_samplers_record(sampler: SamplerFacts, why: str) -> None:
    assert [one.sampler_incompatibility(sampler) for one in _EVERY] == [None] * len(_EVERY)
    recorded = ClippedRatioConfig(old="sampler")
    assert why in str(recorded.sampler_incompatibility(sampler))
    assert recorded.sampler_incompatibility(SamplerFacts()) is None


@pytest.mark.parametrize(("num_steps", "is_refused"), [(3, True), (6, True), (7, False), (128, False)])
def test_every_update_of_egspo_has_denoise_steps_left(num_steps: int, is_refused: bool) -> None:
    """Four updates take two steps each."""
    said = LearnerConfig.model_validate({"algorithm": "egspo", "num_rounds": 1}).incompatibility(
        SamplerFacts(max_denoise_steps=num_steps)
    )
    assert (said is not None) is is_refused
    if said is not None:
        updates = int(said.rsplit("=", 1)[1])
        fitting = LearnerConfig.model_validate({"algorithm": "egspo", "num_rounds": 1, "inner_updates": updates})
        assert fitting.incompatibility(SamplerFacts(max_denoise_steps=num_steps)) is None


def test_shown_steps_are_not_left_for_egspos_updates() -> None:
    settings = {"algorithm": "egspo", "num_rounds": 1, "estimator": {"num_shown_steps": 1}}
    said = LearnerConfig.model_validate(settings).incompatibility(SamplerFacts(max_denoise_steps=7))
    assert said is not None
    assert said.endswith("take learner.inner_updates=3")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"estimator": {"name": "one_step"}}, "estimator trajectory with proposal: top_entropy"),
        ({"estimator": {"proposal": "uniform"}}, "estimator trajectory with proposal: top_entropy"),
        ({"estimator": {"steps_per_segment": 2}}, "steps_per_segment: 1"),
        ({"estimator": {"slots": "text"}}, "slots: denoised"),
        ({"estimator": {"num_shown_steps": 1}}, "num_shown_steps: 0"),
        ({"objective": {"level": "sequence"}}, "objective clipped_ratio with level: token or part"),
        ({"objective": {"name": "weighted_likelihood"}}, "objective clipped_ratio"),
        ({"advantage": "group_z"}, "advantage group_mean, and it is group_z"),
    ],
)
def test_advantages_of_steps_need_a_method_of_steps(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=f"step_gain_coef needs .*{why}"):
        LearnerConfig.model_validate({"algorithm": "egspo-sa", "num_rounds": 1} | changes)


_PAIRS = {"algorithm": "d-treerpo", "num_rounds": 1, "group_size": 4, "estimator": {"branches": [2, 2]}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"group_size": 6}, "estimator.branches 2 x 2 make 4 completions of a problem, and group_size is 6; set"),
        ({"advantage": "part_z"}, "advantage must be group_mean, group_z, round_z or leave_one_out, not part_z"),
        ({"advantage": "correct_z"}, "advantage must be .* not correct_z"),
        (
            {"objective": {"level": "sequence", "normalize_by": "row"}},
            "needs objective clipped_ratio with level: token",
        ),
        ({"objective": {"name": "weighted_likelihood"}}, "estimator.branches needs objective clipped_ratio"),
        ({"value": {}}, "estimator.branches gives each node of a tree an advantage"),
        ({"objective": {"normalize_by": "row"}}, "objective.normalize_by is row, and estimator.branches scores"),
        ({"objective": {"level": "canvas_token"}}, "objective.level canvas_token is for estimators sampled_states and"),
        ({"filters": {"first_correct": True}}, "filters.first_correct keeps one completion"),
        ({"estimator": {"branches": [2, 2], "weigh": "value"}}, "branches needs .* weigh: loss"),
        ({"estimator": {"branches": [4]}}, "at least 2 items"),
        ({"consistency": {"growth": 800}}, "less than or equal to 100"),
        ({"consistency": {"max_temperature": float("inf")}}, "finite number"),
        ({"estimator": {"branches": [2, 2], "num_sampled": 1}}, "branches needs num_shown_steps 0, num_sampled null"),
        ({"estimator": {"branches": [2, 2], "slots": "denoised"}}, "branches needs .* slots: text"),
        ({"estimator": {"branches": [2, 2], "only": "uncertain"}}, "branches needs .* only: all"),
        ({"estimator": {"branches": [2, 2], "num_segments": 2}}, "give one of num_segments, .* and branches"),
        ({"estimator": {"branches": [4, 1]}}, "greater than or equal to 2"),
        ({"estimator": {"branches": []}}, "at least 2 items"),
        ({"estimator": {"name": "one_step"}}, "consistency compares the siblings of a rollout tree"),
        ({"max_staleness": 1}, "max_staleness is 1"),
    ],
)
def test_a_rollout_tree_needs_a_method_of_nodes(changes: dict[str, object], why: str) -> None:
    LearnerConfig.model_validate(_PAIRS)
    with pytest.raises(ValidationError, match=why):
        LearnerConfig.model_validate(_PAIRS | changes)


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (SamplerFacts(has_varying_steps=True), "levels of equally many denoise steps"),
        (SamplerFacts(is_block_causal=True), "needs a bidirectional policy"),
        (SamplerFacts(max_denoise_steps=3), "has 2 levels, and rollout.sampling 3 denoise steps"),
    ],
)
def test_a_rollout_tree_needs_levels_of_equal_steps(sampler: SamplerFacts, why: str) -> None:
    config = LearnerConfig.model_validate(_PAIRS)
    assert config.incompatibility(SamplerFacts()) is None
    assert why in str(config.incompatibility(sampler))


def test_step_answers_need_samplers_that_predict_the_canvas() -> None:
    config = LearnerConfig.model_validate({"algorithm": "egspo-sa", "num_rounds": 1})
    assert config.incompatibility(SamplerFacts()) is None
    assert "needs samplers whose steps predict the whole canvas" in str(
        config.incompatibility(SamplerFacts(predicts_canvas=False))
    )


@pytest.mark.parametrize("settings", [{}, {"num_sampled": 2, "weigh": "mean"}])
def test_ranked_segments_are_counted_and_not_averaged(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="top_entropy needs num_sampled"):
        TrajectoryConfig.model_validate({"steps_per_segment": 1, "proposal": "top_entropy"} | settings)


@pytest.mark.parametrize(("name", "part"), [("tracerl-value", "value"), ("d-treerpo", "consistency")])
def test_null_switches_a_part_of_an_algorithm_off(name: str, part: str) -> None:
    settings = {"algorithm": name, "num_rounds": 1, "group_size": 16}
    assert getattr(LearnerConfig.model_validate(settings), part) is not None
    assert getattr(LearnerConfig.model_validate(settings | {part: None}), part) is None
