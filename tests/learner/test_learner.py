import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.advantages import Filters
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, OneStepConfig, SamplerFacts, TrajectoryConfig, make_terms, token_logps
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.lora import set_adapter
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer
from learner.objectives import ClippedRatioConfig
from learner.optimizer import PolicyOptimizer, StepResult
from learner.parallel.sharding import ShardedPolicy
from learner.probes import sampling_gap
from learner.round import Round


def _config(**changes: object) -> LearnerConfig:
    settings: dict[str, object] = {
        "num_rounds": 1,
        "group_size": 4,
        "groups_per_round": 3,
        "inner_updates": 2,
        "micro_batch_tokens": 70,
        "lr": 1e-2,
        "max_grad_norm": 1e9,
    }
    return LearnerConfig(**settings | changes)  # type: ignore[arg-type]


def test_rewarded_completions_become_likelier(policy: Transformer, rollouts: RolloutBatch) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0] * 3)
    batch = replace(rollouts, rewards=rewards)
    config = _config(estimator=OneStepConfig(p_mask_prompt=0.0), objective=ClippedRatioConfig(kl_coef=0.0), lr=1e-3)
    learner = Learner(ShardedPolicy(policy, None), config)

    def gap() -> float:
        corruption = config.estimator.corrupt(GroupedBatch.of(batch), InnerUpdate(0, 1), SamplerFacts())
        terms = make_terms(batch, policy.config, corruption)
        good = rewards[terms.rows] > 0
        with torch.no_grad():
            values = token_logps(policy, terms.views)
        return (values[good].mean() - values[~good].mean()).item()

    before = gap()
    for round_index in range(5):
        learner.update(batch, round_index)
    assert gap() > before + 0.1


def test_equal_rewards_do_not_change_the_policy(policy: Transformer, rollouts: RolloutBatch) -> None:
    """A round without a gradient steps neither on the momentum of the rounds before nor by weight decay."""
    learner = Learner(ShardedPolicy(policy, None), _config(objective=ClippedRatioConfig(kl_coef=0.0), weight_decay=0.1))
    learner.update(rollouts, 0)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    moments = {name: tensor.clone() for name, tensor in learner.state().items()}
    metrics = learner.update(replace(rollouts, rewards=torch.ones(12)), 1)
    assert metrics["frac_reward_zero_std"] == 1
    assert metrics["grad_norm"] == 0
    assert all(torch.equal(tensor, moments[name]) for name, tensor in learner.state().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_has_its_policys_precision(policy: Transformer, dtype: torch.dtype) -> None:
    """Otherwise each forward of a half-precision policy's reference would take a GPU about ten times as long."""
    held = ShardedPolicy(copy.deepcopy(policy).to(dtype), None)
    reference = held.frozen_copy()
    assert reference.dtypes == held.dtypes == dict.fromkeys(held.shapes, dtype)
    for name, weight in reference.full_weights().items():
        assert torch.equal(weight, policy.get_parameter(name).detach().to(dtype))


def test_the_reference_is_synced_every_reference_sync_rounds(policy: Transformer, rollouts: RolloutBatch) -> None:
    for every, expected_round in ((0, None), (2, 2)):
        learner = Learner(ShardedPolicy(policy, None), _config(reference_sync_rounds=every))
        assert learner.reference is not None
        start = learner.reference.full_weights()
        for round_index in range(2):
            learner.update(rollouts, round_index)
            learner.sync_reference(round_index)
            moved = not torch.equal(learner.reference.full_weights()["head.weight"], start["head.weight"])
            assert moved == (expected_round == round_index + 1)


def test_kl_starts_at_zero_and_grows(policy: Transformer, rollouts: RolloutBatch) -> None:
    learner = Learner(ShardedPolicy(policy, None), _config(inner_updates=1))
    assert learner.update(rollouts, 0)["kl"] == pytest.approx(0, abs=1e-7)
    assert learner.update(rollouts, 1)["kl"] > 1e-6


def test_a_non_finite_gradient_raises_and_leaves_the_policy_unchanged(
    policy: Transformer, rollouts: RolloutBatch
) -> None:
    before, policy_before = policy.head.weight.clone(), copy.deepcopy(policy)
    learner = Learner(ShardedPolicy(policy, None), _config())
    with pytest.raises(FloatingPointError, match="no step is taken"):
        learner.update(replace(rollouts, rewards=torch.tensor([float("inf")] * 12)), 0)
    assert torch.equal(policy.head.weight, before)
    after = learner.update(rollouts, 1)
    untouched = Learner(ShardedPolicy(policy_before, None), _config())
    assert after == pytest.approx(untouched.update(rollouts, 1)), "nothing is left of the bad one"


@pytest.mark.parametrize("num_rounds_before", [0, 1])
def test_a_failed_step_undoes_the_earlier_steps_of_its_round(
    policy: Transformer, rollouts: RolloutBatch, monkeypatch: pytest.MonkeyPatch, num_rounds_before: int
) -> None:
    learner = Learner(ShardedPolicy(policy, None), _config(inner_updates=4))
    for round_index in range(num_rounds_before):
        learner.update(rollouts, round_index)
    weights, state = copy.deepcopy(policy.state_dict()), learner.full_state()
    num_steps, step = 0, PolicyOptimizer.step

    def fails_at_the_third(self: PolicyOptimizer, lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        nonlocal num_steps
        num_steps += 1
        return step(self, lr, max_grad_norm, loss * float("nan") if num_steps == 3 else loss)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyOptimizer, "step", fails_at_the_third)
        with pytest.raises(FloatingPointError, match="the loss is nan"):
            learner.update(rollouts, 1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.state_dict().items())
    after = learner.full_state()
    assert after.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in after.items())


def test_group_normalization_weighs_tokens_unequally(policy: Transformer, rollouts: RolloutBatch) -> None:
    """d1's normalization is available by name, and its gradient differs from the default's."""
    norms = []
    for normalization in ("round", "group"):
        model = Transformer(policy.config)
        model.load_state_dict(policy.state_dict())
        objective = ClippedRatioConfig(normalize_by=normalization)  # type: ignore[arg-type]
        learner = Learner(ShardedPolicy(model, None), _config(objective=objective, inner_updates=1))
        norms.append(learner.update(rollouts, 0)["grad_norm"])
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def test_sampling_logp_difference_detects_another_policy(policy: Transformer, rollouts: RolloutBatch) -> None:
    sampler = SamplerFacts(temperature=0.8)
    batch = _recorded_by(policy, rollouts, sampler)
    learner = Learner(ShardedPolicy(policy, None), _config(inner_updates=1), sampler)
    assert learner.update(batch, 0)["sampling/sampling_logp_difference/max"] < 1e-5
    assert learner.update(batch, 1)["sampling/sampling_logp_difference/mean"] > 1e-3


def _recorded_by(model: Transformer, batch: RolloutBatch, sampler: SamplerFacts) -> RolloutBatch:
    """Return the completions with log-probabilities as if this policy had sampled them."""
    exact, grouped = TrajectoryConfig(steps_per_segment=1, law="sampler"), GroupedBatch.of(batch)
    terms = make_terms(grouped, model.config, exact.corrupt(grouped, InnerUpdate(0, 1), sampler))
    recorded = torch.zeros_like(batch.commit_logp)
    with torch.no_grad():
        recorded[terms.rows, terms.slots] = token_logps(model, terms.views, terms.distribution)
    return replace(batch, commit_logp=recorded)


def test_adapter_share_measures_how_much_of_it_the_sampler_used(policy: Transformer, rollouts: RolloutBatch) -> None:
    """All, none, and part of it; no share is reported for an adapter that has changed nothing."""
    sampler, lora, share = SamplerFacts(temperature=0.8), LoraConfig(rank=4, alpha=8), "sampling/adapter_share"
    start = copy.deepcopy(policy)
    learned = ShardedPolicy(policy, None, lora=lora)
    learner = Learner(learned, _config(inner_updates=1, lr=1e-3), sampler)
    batch = _recorded_by(learned.module, rollouts, sampler)
    assert share not in learner.update(batch, 0)
    adapter = learned.adapter_on_rank_0()
    half = {name: matrix / 2 if ".lora_B." in name else matrix for name, matrix in adapter.items()}
    found = {}
    for name, matrices in (("all", adapter), ("half", half), ("nothing", {})):
        sampled = copy.deepcopy(start)
        set_adapter(sampled, matrices, lora.scaling)
        found[name] = sampling_gap(learned, learner.config, sampler, _recorded_by(sampled, rollouts, sampler))[share]
    assert found["all"] == pytest.approx(1, abs=1e-3)
    assert found["half"] == pytest.approx(0.5, abs=0.1)
    assert found["nothing"] == pytest.approx(0, abs=1e-3)
    whole = ShardedPolicy(start, None)
    assert share not in sampling_gap(whole, learner.config, sampler, _recorded_by(start, rollouts, sampler))


def test_a_round_without_completions_left_changes_nothing(policy: Transformer, rollouts: RolloutBatch) -> None:
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    batch = replace(rollouts, rewards=torch.ones(12))
    learner = Learner(ShardedPolicy(policy, None), _config(filters=Filters(zero_variance=True)))
    metrics = learner.update(batch, 0)
    assert metrics["num_trained_completions"] == 0
    assert "loss" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_metrics_describe_the_completions(policy: Transformer, rollouts: RolloutBatch) -> None:
    metrics = Learner(ShardedPolicy(policy, None), _config()).update(rollouts, 0)
    lengths = rollouts.completion_lengths.float()
    assert metrics["completions/mean_length"] == pytest.approx(float(lengths.mean()))
    assert metrics["completions/clipped_ratio"] == pytest.approx(float((lengths == 8).float().mean()))
    assert metrics["tokens_per_forward"] == pytest.approx(float(lengths.sum()) / 48)
    stds = [float(rollouts.rewards[first : first + 4].std(correction=0)) for first in (0, 4, 8)]
    assert metrics["reward_std"] == pytest.approx(sum(stds) / 3)
    assert 0 < metrics["effective_sample_share"] <= 1
    assert metrics["ratio_max"] >= metrics["ratio_mean"]


def test_loading_the_initial_optimizer_state_clears_the_moments(policy: Transformer) -> None:
    optimizer = PolicyOptimizer(ShardedPolicy(policy, None), betas=(0.9, 0.99), weight_decay=0.1)
    before = optimizer.full_state()
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3, 1.0, torch.tensor(0.0))
    assert optimizer.full_state()
    optimizer.load_full_state(before)
    assert optimizer.full_state() == before == {}


def test_norms_and_biases_have_no_weight_decay(config: TransformerConfig) -> None:
    model = make_model(
        TransformerConfig(**config.model_dump() | {"family": "dream", "qkv_bias": True, "predicts_next": True})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            # AdamW's epsilon makes a step of such a gradient negligible; of zero there would be no step.
            parameter.grad = torch.full_like(parameter, 1e-20)
    optimizer = PolicyOptimizer(ShardedPolicy(model, None), betas=(0.9, 0.99), weight_decay=0.1)
    optimizer.step(0.5, 1.0, torch.tensor(0.0))
    found = {name: float(parameter.detach().mean()) for name, parameter in model.named_parameters()}
    expected = {name: 1.0 if name.endswith(("norm.weight", "bias")) else 0.95 for name in found}
    assert found == pytest.approx(expected)
    assert set(expected.values()) == {1.0, 0.95}


def test_a_plan_marks_micro_batches_without_scored_tokens(policy: Transformer, rollouts: RolloutBatch) -> None:
    some = Round(ShardedPolicy(policy, None), _config(), SamplerFacts(), rollouts).plan(0)
    assert len(some.counts) == len(some.micro_batches) > 1
    assert all(some.counts)
    nothing = replace(rollouts, completion_lengths=torch.zeros(12, dtype=torch.int64))
    assert Round(ShardedPolicy(policy, None), _config(), SamplerFacts(), nothing).plan(0).counts == (False,)


@pytest.mark.parametrize(
    ("clips", "is_narrow"),
    [((0.2, 0.2), False), ((1e-3, 1e-3), False), ((3e-4, 4e-4), True), ((0.2, 4e-4), True), ((None, None), False)],
)
def test_narrow_clipping_uses_a_float32_head(
    policy: Transformer, rollouts: RolloutBatch, clips: tuple[float | None, float | None], is_narrow: bool
) -> None:
    """For the policy and the reference alike; in float32 it makes no difference."""
    config = _config(objective=ClippedRatioConfig(clip_low=clips[0], clip_high=clips[1]))
    plan = Round(ShardedPolicy(policy, None), config, SamplerFacts(), rollouts).plan(0)
    assert {micro.distribution.float32_head for micro in plan.micro_batches} == {is_narrow}
    half = copy.deepcopy(policy).to(torch.bfloat16)
    micro = plan.micro_batches[0]
    rounded, found = (
        token_logps(half, micro.views, replace(micro.distribution, float32_head=one))
        for one in (False, micro.distribution.float32_head)
    )
    assert torch.equal(rounded, found) != is_narrow
