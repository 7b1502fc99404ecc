import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from learner.advantages import Advantage, Filters, Rewards, group_advantages, zero_variance_share
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.estimators.views import SOFTMAX, Views
from learner.objectives import ClippedRatioConfig, Kl, Logps, Loss, PreferenceConfig, RowFacts, TrajectoryBalanceConfig
from learner.objectives.clipped_ratio import kl_estimate

CONFIG = ClippedRatioConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.5)
NOTHING = torch.zeros(0, dtype=torch.long)


def _loss(
    config: ClippedRatioConfig, new: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor
) -> Loss:
    """Compute the loss with one token per row, each of importance 1."""
    terms = _terms([1] * len(new), torch.ones(len(new), dtype=new.dtype))
    return config.loss(terms, Logps(new=new, old=old, reference=reference, sampled=old), _rows(advantages))


def _terms(lengths: list[int], importance: torch.Tensor) -> Terms:
    """Return the terms of completions of these lengths, each token scored once."""
    views = Views(ids=NOTHING, lengths=NOTHING, slots=NOTHING, scored=NOTHING, targets=NOTHING)
    slots = torch.cat([torch.arange(length) for length in lengths])
    return Terms(
        views=views,
        distribution=SOFTMAX,
        rows=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        slots=slots,
        parts=torch.zeros_like(slots),
        weights=torch.ones_like(importance),
        importance=importance,
    )


def _rows(advantages: torch.Tensor) -> RowFacts:
    """Return the facts of one group, in which rows with positive advantages are correct."""
    correct = advantages > 0
    return RowFacts(
        advantages=advantages,
        groups=torch.zeros(len(advantages), dtype=torch.long),
        sizes=torch.ones_like(advantages),
        correct=correct,
        num_rows=len(advantages),
        num_correct=int(correct.sum()),
        num_groups=1,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, None),
        (1.2, 1.0, -1.2, None),
        (1.6, 1.0, -1.3, "clip_ratio/high"),
        (0.5, 1.0, -0.5, None),
        (0.5, -1.0, 0.8, "clip_ratio/low"),
        (1.6, -1.0, 1.6, None),
    ],
)
def test_surrogate_is_the_pessimistic_clip(ratio: float, advantage: float, loss: float, clipped: str | None) -> None:
    new = torch.tensor([math.log(ratio)])
    found = _loss(CONFIG, new, torch.zeros(1), new, torch.tensor([advantage]))
    assert found.total.item() == pytest.approx(loss, abs=1e-6)
    assert found.per_unit["ratio"].item() == pytest.approx(ratio)
    assert found.per_unit["kl"].item() == 0
    for name in ("clip_ratio/low", "clip_ratio/high"):
        assert found.per_unit[name].item() == (name == clipped)


def test_gradient_at_ratio_one_is_minus_the_advantage() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.3])
    _loss(CONFIG, new, new.detach(), new.detach(), advantages).total.backward()
    torch.testing.assert_close(new.grad, -advantages)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    # d = reference - new = -1; the derivative is by new, and d decreases in new.
    [(Kl.K1, 1.0, 1.0), (Kl.K2, 0.5, 1.0), (Kl.K3, math.exp(-1), 1 - math.exp(-1))],
)
def test_kl_pulls_towards_the_reference(kind: Kl, value: float, slope: float) -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    config = ClippedRatioConfig(kl=kind, kl_coef=0.5)
    found = _loss(config, new, new.detach(), torch.tensor([-2.0]), torch.tensor([0.0]))
    assert found.per_unit["kl"].item() == pytest.approx(value)
    assert found.total.item() == pytest.approx(0.5 * value)
    found.total.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(0.5 * slope)


def test_truncated_importance_sampling_weights_each_units_loss() -> None:
    """By the learner's old likelihood over the sampler's record, at most the limit; the KL penalty is not weighted."""
    log_weights, advantages = torch.tensor([0.0, 0.5, 5.0, -1.0]), torch.tensor([1.0, -0.5, 0.7, 0.2])
    new, old = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True), torch.tensor([-1.1, -2.1, -0.4, -3.0])
    terms = _terms([1] * 4, torch.ones(4))
    logps = Logps(new=new, old=old, reference=old - 1, sampled=old - log_weights)
    plain, weighted = (
        config.loss(terms, logps, _rows(advantages))
        for config in (CONFIG, CONFIG.model_copy(update={"max_sampler_ratio": 2.0}))
    )
    weights = torch.tensor([1.0, math.exp(0.5), 2.0, math.exp(-1.0)])
    torch.testing.assert_close(weighted.per_unit["sampler_ratio"], weights)
    ratios = (new - old).exp()
    surrogates = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.3) * advantages)
    penalty = 0.5 * plain.per_unit["kl"].sum()
    assert plain.total.item() == pytest.approx((surrogates.sum() + penalty).item())
    assert weighted.total.item() == pytest.approx(((weights * surrogates).sum() + penalty).item())
    without_kl = CONFIG.model_copy(update={"kl_coef": 0.0, "max_sampler_ratio": 2.0})
    without_kl.loss(terms, logps, _rows(advantages)).total.backward()
    torch.testing.assert_close(new.grad, -weights * ratios.detach() * advantages)


def test_truncated_importance_sampling_weighs_completions_by_their_whole_likelihood() -> None:
    """Also where the ratio is a mean per slot."""
    old = torch.zeros(4)
    terms, rows = _terms([3, 1], torch.ones(4)), replace(_rows(torch.ones(2)), sizes=torch.tensor([3.0, 1.0]))
    logps = Logps(new=old, old=old, reference=old, sampled=old - 0.2)
    config = ClippedRatioConfig(level=Level.ROW, kl_coef=0.0, max_sampler_ratio=2.0)
    weights = torch.tensor([math.exp(0.6), math.exp(0.2)])
    torch.testing.assert_close(config.loss(terms, logps, rows).per_unit["sampler_ratio"], weights)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"old": "sampler"}, "max_sampler_ratio needs old: learner"),
        ({"level": "sequence", "order_temperature": 1.0}, "max_sampler_ratio excludes order_temperature"),
    ],
)
def test_truncated_importance_sampling_needs_the_learners_ratio(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ClippedRatioConfig.model_validate({"max_sampler_ratio": 2.0} | settings)


def test_ratios_to_an_fp8_samplers_record_are_refused() -> None:
    exact = {"name": "trajectory", "steps_per_segment": 1, "law": "sampler"}
    settings = {"num_rounds": 1, "max_staleness": 1, "estimator": exact}
    in_fp8 = SamplerFacts(is_fp8=True)
    recorded = LearnerConfig.model_validate(settings | {"objective": {"name": "clipped_ratio", "old": "sampler"}})
    assert recorded.incompatibility(SamplerFacts()) is None
    said = recorded.incompatibility(in_fp8)
    assert said is not None
    assert said.endswith("take learner.objective.old=learner and learner.objective.max_sampler_ratio=2")
    truncated = LearnerConfig.model_validate(
        settings | {"objective": {"name": "clipped_ratio", "max_sampler_ratio": 2.0}}
    )
    assert truncated.incompatibility(in_fp8) is None
    assert truncated.incompatibility(SamplerFacts(has_reproducible_logps=False)) is None, "with a KV cache"
    said = truncated.incompatibility(SamplerFacts(has_exact_logps=False))
    assert said is not None
    assert said.startswith("objective.max_sampler_ratio is 2; a sampler with sample_then_select")
    with pytest.raises(ValidationError, match="max_sampler_ratio is 2: the estimator must be trajectory"):
        LearnerConfig.model_validate(
            settings
            | {"estimator": {"name": "one_step"}, "objective": {"name": "clipped_ratio", "max_sampler_ratio": 2}}
        )


def test_k3_and_k2_are_never_negative() -> None:
    difference = torch.linspace(-3, 3, 31)
    assert (kl_estimate(Kl.K3, difference) >= 0).all()
    assert (kl_estimate(Kl.K2, difference) >= 0).all()


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    new, old, reference = (torch.randn(6, dtype=torch.float64) * 0.1 for _ in range(3))
    advantages = torch.randn(6, dtype=torch.float64)
    new.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda values: _loss(CONFIG, values, old, reference, advantages).total, new)


def test_lightningrls_loss_equals_its_code() -> None:
    """SJTU-DENG-Lab/LightningRL, commit e4d7d29, models/sdar/modeling_sdar.py: all three means are over sequences."""
    new = torch.tensor([-1.0, -0.5, -2.0, -0.3, -1.2, -0.7], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -0.9, -1.5, -0.3, -1.6, -0.4], dtype=torch.float64)
    reference = torch.tensor([-1.3, -0.4, -2.2, -0.1, -1.0, -0.9], dtype=torch.float64)
    shares = torch.tensor([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3], dtype=torch.float64)
    config = LearnerConfig.model_validate({"num_rounds": 1, "algorithm": "lightningrl"}).objective
    logps = Logps(new=new, old=old, reference=reference, sampled=old)
    loss = config.loss(_terms([2, 3, 1], shares), logps, _rows(torch.tensor([0.8, -1.1, 0.4], dtype=torch.float64)))
    assert loss.total.item() == pytest.approx(0.06890970258491574, rel=1e-9)
    assert loss.per_unit["nll"].tolist() == [1.0, 0.5, 0.7]
    loss.total.backward()
    gradient = [-0.17192415277788922, -0.025175284863459414, 0.00020141027435779805]
    gradient += [0.12197621915759982, 0.18208812664708846, -0.14817153193448898]
    torch.testing.assert_close(new.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("setting", [{"level": "sequence"}, {"normalize_by": "round"}, {"normalize_by": "group"}])
def test_a_likelihood_of_the_correct_completions_is_a_mean_over_completions(setting: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="nll_coef needs level: token and normalize_by: row"):
        ClippedRatioConfig.model_validate({"nll_coef": 0.1, "normalize_by": "row"} | setting)


@pytest.mark.parametrize("baseline", [0.0, 0.5, -3.0])
def test_tbas_loss_equals_its_code(baseline: float) -> None:
    """bbartoldson/TBA, commit f2613ab: src/tba_trainer_gsm8k.py, for one prompt. log Z absorbs any reward offset that a
    group shares."""
    new = torch.tensor([-1.5, -3.5, -0.7, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.7, -3.3, -0.9, -2.4], dtype=torch.float64)
    rows = _rows(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64) - baseline)
    logps = Logps(new=new, old=new.detach(), reference=reference, sampled=reference)
    terms = _terms([1] * 4, torch.full((4,), 0.25, dtype=torch.float64))
    loss = TrajectoryBalanceConfig(beta=0.014).loss(terms, logps, rows).total
    assert loss.item() == pytest.approx(1264.843418367347, rel=1e-12)
    loss.backward()
    gradient = [-17.832142857142856, 17.682142857142857, 17.88214285714286, -17.732142857142858]
    torch.testing.assert_close(new.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_tilted_reference_has_no_residual() -> None:
    """With new - reference = reward / beta - log Z, for any log Z."""
    reference, rewards = -torch.rand(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    logps = Logps(new=reference + rewards / 0.3 - 1.7, old=reference, reference=reference, sampled=reference)
    loss = TrajectoryBalanceConfig(beta=0.3).loss(
        _terms([1] * 5, torch.ones(5, dtype=torch.float64)), logps, _rows(rewards)
    )
    assert loss.total.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "estimator",
    [
        {"name": "one_step"},
        {"name": "random_masks"},
        {"name": "block_masks"},
        {"name": "trajectory", "steps_per_segment": 1, "only": "uncertain"},
        {"name": "trajectory", "steps_per_segment": 1, "num_sampled": 2},
    ],
)
def test_trajectory_balance_needs_a_completions_likelihood(estimator: dict[str, object]) -> None:
    settings = {"num_rounds": 1, "estimator": estimator, "objective": {"name": "trajectory_balance"}}
    with pytest.raises(ValidationError, match="estimator must give it, as elbo does, or trajectory with only: all"):
        LearnerConfig.model_validate(settings)


@pytest.mark.parametrize("algorithm", ["dmpo", "tba"])
@pytest.mark.parametrize("advantage", list(Advantage))
def test_trajectory_balance_needs_unnormalized_rewards(algorithm: str, advantage: Advantage) -> None:
    settings = {"num_rounds": 1, "algorithm": algorithm, "advantage": advantage}
    if advantage is Advantage.GROUP_MEAN:
        assert LearnerConfig.model_validate(settings).advantage is advantage
    else:
        refusal = rf"tilts the reference by the reward: advantage must be group_mean, .*, not {advantage}"
        with pytest.raises(ValidationError, match=refusal):
            LearnerConfig.model_validate(settings)


def test_trajectory_balance_accepts_stale_completions() -> None:
    assert LearnerConfig.model_validate({"num_rounds": 1, "algorithm": "tba", "max_staleness": 3}).max_staleness == 3
    with pytest.raises(ValidationError, match="or the objective trajectory_balance, or max_staleness 0"):
        LearnerConfig.model_validate({"num_rounds": 1, "max_staleness": 3})


def test_a_speed_filter_needs_varying_steps() -> None:
    config = LearnerConfig.model_validate({"num_rounds": 1, "algorithm": "lightningrl"})
    assert config.incompatibility(SamplerFacts(has_varying_steps=True)) is None
    assert config.incompatibility(SamplerFacts()) == (
        "filters.min_speed_range is 0.01; the sampler takes equally many steps for every block: set "
        "rollout.sampling.threshold, factor or entropy_bound, or min_speed_range 0"
    )


def _rewards(totals: list[float], groups: list[int], parts: list[list[float]] | None = None) -> Rewards:
    total = torch.tensor(totals)
    return Rewards(
        total=total,
        parts=total[:, None] if parts is None else torch.tensor(parts),
        correct=total > 0,
        groups=torch.tensor(groups),
    )


def test_advantages_are_within_the_group() -> None:
    rewards = _rewards([1.0, 0.0, 5.0, 7.0], [3, 3, 8, 8])
    assert group_advantages(rewards, Advantage.GROUP_MEAN).tolist() == [0.5, -0.5, -1.0, 1.0]
    z = group_advantages(rewards, Advantage.GROUP_Z)
    torch.testing.assert_close(z, torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3, rtol=0)
    round_z = group_advantages(rewards, Advantage.ROUND_Z)
    torch.testing.assert_close(round_z, torch.tensor([0.5, -0.5, -1.0, 1.0]) / 0.625**0.5, atol=1e-3, rtol=0)


def test_leave_one_out_uses_the_mean_of_the_others() -> None:
    advantages = group_advantages(_rewards([1.0, 2.0, 6.0, 4.0], [0, 0, 0, 1]), Advantage.LEAVE_ONE_OUT)
    torch.testing.assert_close(advantages, torch.tensor([-3.0, -1.5, 4.5, 0.0]))


def test_softmax_pairs_sum_to_zero_and_emphasize_extremes() -> None:
    advantages = group_advantages(_rewards([0.0, 1.0, 2.0], [0, 0, 0]), Advantage.SOFTMAX_PAIR)
    centred = torch.tensor([-1.0, 0.0, 1.0])
    torch.testing.assert_close(advantages, centred.softmax(0) - (-centred).softmax(0))


def test_parts_of_different_scale_have_equal_weight() -> None:
    rewards = _rewards([1.0, 100.0], [0, 0], [[1.0, 0.0], [0.0, 100.0]])
    torch.testing.assert_close(group_advantages(rewards, Advantage.PART_Z), torch.zeros(2), atol=1e-3, rtol=0)


def test_correctness_advantages_ignore_the_reward() -> None:
    rewards = _rewards([0.1, 0.9, 0.0, -1.0, 0.2, 7.0], [4, 4, 4, 4, 2, 2])
    z = group_advantages(rewards, Advantage.CORRECT_Z)
    torch.testing.assert_close(z, torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0]), atol=1e-3, rtol=0)


def test_lightningrls_advantages_equal_its_code() -> None:
    """SJTU-DENG-Lab/LightningRL, commit e4d7d29: `reward/rl_reward.py`, then `train/train_policy_no_value.py`, in its
    configured mode. Its standard deviation over the round divides by n - 1."""
    correct = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    speeds = [2.0, 1.0, 4.0, 1.5, 3.0, 3.5, 5.0, 2.5]
    parts = [list(pair) for pair in zip(correct, speeds, strict=True)]
    advantages = group_advantages(_rewards([0.0] * 8, [0] * 4 + [1] * 4, parts), Advantage.ROUND_PART_Z)
    theirs = [0.5167882442474365, -1.153977632522583, 0.37527692317962646, 0.26191246509552]
    theirs += [-0.6454501152038574, -0.3351559638977051, 1.9363502264022827, -0.955744206905365]
    torch.testing.assert_close(advantages, torch.tensor(theirs) * (8 / 7) ** 0.5, atol=2e-4, rtol=2e-4)


def test_parts_normalized_over_the_round_have_unit_variance() -> None:
    rewards = _rewards([0.0] * 5, [0, 0, 1, 1, 1], [[1.0, 3.0], [0.0, 5.0], [0.0, 7.0], [0.0, 9.0], [1.0, 2.0]])
    parts_z = group_advantages(rewards, Advantage.PART_Z)
    round_z = group_advantages(rewards, Advantage.ROUND_PART_Z)
    assert round_z.square().mean().item() == pytest.approx(1, rel=1e-3)
    torch.testing.assert_close(round_z, parts_z / parts_z.square().mean().sqrt(), atol=1e-3, rtol=0)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    rewards = _rewards([0.1, 0.1, 0.1, 5.0, 7.0, 0.0], [0, 0, 0, 1, 1, 1])
    for advantage in Advantage:
        assert group_advantages(rewards, advantage)[:3].abs().max() < 1e-4
    assert zero_variance_share(rewards) == 0.5


def test_filters_drop_groups_or_truncated_completions() -> None:
    rewards = _rewards([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2])
    truncated = torch.tensor([False, False, True, False, False, False])
    speeds = torch.tensor([1.0, 1.5, 4.0, 4.0, 2.0, 2.01])

    def kept(**settings: object) -> list[bool]:
        return Filters(**settings).keeps(rewards, truncated, speeds).tolist()  # type: ignore[arg-type]

    assert all(kept())
    assert kept(zero_variance=True) == [False, False, True, True, False, False]
    assert kept(min_accuracy=0.2) == [True, True, True, True, False, False]
    assert kept(max_accuracy=0.8) == [False, False, True, True, True, True]
    assert kept(truncated=True) == [True, True, False, True, True, True]
    assert kept(min_speed_range=0.01) == [True, True, False, False, True, True]
    assert kept(min_speed_range=0.5) == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("estimator", "level", "what"),
    [
        ({"name": "random_masks"}, "token", "random_masks scores a token"),
        ({"name": "elbo", "num_draws": 2}, "token", "elbo scores a token"),
        ({"name": "elbo", "num_draws": 2}, "sequence", "elbo scores a completion"),
        ({"name": "block_masks", "num_draws": 2}, "token", "block_masks scores a token"),
        ({"name": "trajectory", "num_segments": 4}, "sequence", "trajectory scores a completion"),
    ],
)
def test_a_mean_over_parts_is_refused_for_split_units(estimator: dict[str, object], level: str, what: str) -> None:
    objective = {"name": "clipped_ratio", "level": level, "normalize_by": "part"}
    with pytest.raises(ValidationError) as refused:
        LearnerConfig.model_validate({"num_rounds": 1, "estimator": estimator, "objective": objective})
    assert f"objective.normalize_by is part, and estimator {what} in several draws or segments" in str(refused.value)


@pytest.mark.parametrize("changes", [{"normalize_by": "round"}, {"normalize_by": "part", "level": "part"}])
def test_summed_kl_needs_a_mean_over_parts(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="kl_sums_tokens needs level: token and normalize_by: part"):
        ClippedRatioConfig.model_validate({"kl_sums_tokens": True, **changes})


@pytest.mark.parametrize(
    ("estimator", "level"),
    [
        ({"name": "one_step"}, "token"),
        ({"name": "random_masks", "coupled": False}, "token"),
        ({"name": "elbo", "num_draws": 1}, "sequence"),
        ({"name": "elbo", "num_draws": 2}, "part"),
        ({"name": "trajectory", "num_segments": 4}, "token"),
    ],
)
def test_a_mean_over_parts_is_accepted_for_unsplit_units(estimator: dict[str, object], level: str) -> None:
    objective = {"name": "clipped_ratio", "level": level, "normalize_by": "part"}
    config = LearnerConfig.model_validate({"num_rounds": 1, "estimator": estimator, "objective": objective})
    assert config.objective.normalize_by == "part"


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"level": "token"}, "an order is no single token's"), ({"level": "sequence", "old": "sampler"}, "no logits")],
)
def test_scores_order_needs_whole_completions_and_unshaped_logits(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ClippedRatioConfig.model_validate({"order_temperature": 1.0} | settings)


def test_the_margin_is_beta_times_how_much_more_the_better_completion_gained() -> None:
    """TRL's rewards/margins and rewards/accuracies, of the implicit rewards of DPO."""
    new, reference = torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([-2.0, -2.5, -2.5])
    logps = Logps(new=new, old=new, reference=reference, sampled=new)
    config = PreferenceConfig(beta=0.2)

    def metrics(*advantages: float) -> dict[str, list[float]]:
        loss = config.loss(_terms([1] * 3, torch.full((3,), 1 / 3)), logps, _rows(torch.tensor(advantages)))
        return {name: values.tolist() for name, values in loss.per_unit.items()}

    # The gains are 1, -0.5 and 0.5.
    found = metrics(1.0, 0.0, 0.0)
    assert found["margin"] == pytest.approx([0.3, 0.1])
    assert found["preferred"] == [1.0, 1.0]
    found = metrics(0.0, 1.0, 0.0)
    assert found["margin"] == pytest.approx([-0.3, -0.2])
    assert found["preferred"] == [0.0, 0.0]
    assert metrics(1.0, 1.0, 1.0) == {"preferred": [], "margin": []}


def test_stored_pairs_are_groups_of_two_for_a_preference_objective_without_filters() -> None:
    settings = {"num_rounds": 1, "algorithm": "vrpo", "pairs": "pairs.jsonl", "group_size": 6}
    config = LearnerConfig.model_validate(settings)
    assert (config.pairs, config.group_size) == (Path("pairs.jsonl"), 2)
    assert LearnerConfig.model_validate(settings | {"pairs": None}).group_size == 6
    with pytest.raises(ValidationError, match="objective clipped_ratio learns from graded completions; take the"):
        LearnerConfig.model_validate(settings | {"algorithm": "espo"})
    with pytest.raises(ValidationError, match="filters select among graded completions, and pairs has none"):
        LearnerConfig.model_validate(settings | {"filters": {"min_accuracy": 0.1}})
