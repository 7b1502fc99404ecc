"""Probes: estimates of a round's likelihoods from a few completions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from learner.algorithms import ALGORITHMS
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts
from learner.model.transformer import Transformer
from learner.parallel.sharding import ShardedPolicy
from learner.probes import likelihood_gap, mask_variance
from learner.seeds import fold

SAMPLER = SamplerFacts(temperature=0.7, block_length=4, has_fallback=True)


def _config(estimator: dict[str, object]) -> LearnerConfig:
    settings: dict[str, object] = {"num_rounds": 1, "group_size": 4, "estimator": estimator}
    if estimator.get("scores_order"):
        settings["objective"] = {"name": "clipped_ratio", "level": "sequence", "order_temperature": 1.0}
    return LearnerConfig.model_validate(settings)


def _copies(batch: RolloutBatch, times: int = 3) -> RolloutBatch:
    """Repeat the batch so that each 12 completions have one probed completion."""
    rows = torch.arange(12 * times)
    columns = {name: value[(rows + rows // 12 * 3) % 12] for name, value in batch.given().items()}
    return RolloutBatch(**columns | {"sample_keys": rows * 31, "group_ids": rows // 4})


def _estimate(policy: Transformer, batch: RolloutBatch, config: LearnerConfig, row: int, draw: int) -> float:
    """Compute a completion's mean log-probability, token by token on whole canvases in float64."""
    alone = batch.select(slice(row, row + 1))
    key = fold(int(alone.sample_keys), 71, draw)
    grouped = GroupedBatch.of(replace(alone, sample_keys=torch.tensor([key])))
    masks = config.estimator.corrupt(grouped, InnerUpdate(0, config.inner_updates), SAMPLER)
    length = int(alone.prompt_lengths)
    total = weight = 0.0
    for canvas in range(len(masks.rows)):
        prompt = alone.prompt_ids[0, :length].clone()
        if masks.prompt_masked is not None:
            prompt[masks.prompt_masked[canvas, :length]] = 38
        ids = torch.cat((prompt, alone.completion_ids[0].masked_fill(masks.masked[canvas], 38)))
        with torch.no_grad():
            logps = policy(ids[None])[0].double().log_softmax(dim=-1)
        for slot in masks.scored[canvas].nonzero()[:, 0].tolist():
            share = 1.0 if masks.weights is None else float(masks.weights[canvas, slot])
            share *= 1.0 if masks.importance is None else float(masks.importance[canvas, slot])
            total += share * float(logps[length + slot, alone.completion_ids[0, slot]])
            weight += share
    return total / weight


@pytest.mark.parametrize(
    "estimator",
    [
        {"name": "one_step"},
        {"name": "elbo", "num_draws": 2, "counts": "row", "complement": False},
        {"name": "block_masks", "num_draws": 2},
        {"name": "trajectory", "steps_per_segment": 1, "num_sampled": 2, "proposal": "entropy"},
        {"name": "trajectory", "steps_per_segment": 1, "num_sampled": 1, "weigh": "value", "scores_order": True},
    ],
    ids=lambda estimator: "order" if "scores_order" in estimator else estimator["name"],
)
def test_the_variance_equals_that_of_two_draws(
    policy: Transformer, rollouts: RolloutBatch, estimator: dict[str, object]
) -> None:
    batch, config = _copies(rollouts), _config(estimator)
    found = mask_variance(ShardedPolicy(policy, None), config, SAMPLER, batch)["estimator_variance"]
    expected = [torch.tensor([_estimate(policy, batch, config, row, draw) for draw in (0, 1)]) for row in (0, 12, 24)]
    assert found == pytest.approx(float(torch.stack([pair.var() for pair in expected]).mean()), rel=1e-4)
    assert found > 1e-6


@pytest.mark.parametrize(
    "estimator", [{"name": "one_step", "p_mask_prompt": 0}, {"name": "trajectory", "num_segments": 2}]
)
def test_a_deterministic_estimator_has_no_variance_and_runs_no_forward(
    policy: Transformer, rollouts: RolloutBatch, estimator: dict[str, object]
) -> None:
    policy.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    found = mask_variance(ShardedPolicy(policy, None), _config(estimator), SAMPLER, rollouts)
    assert found == {"estimator_variance": 0.0}


def test_more_elbo_draws_have_less_variance(policy: Transformer, rollouts: RolloutBatch) -> None:
    found = [
        mask_variance(ShardedPolicy(policy, None), config, SAMPLER, _copies(rollouts, 8))
        for config in (_config({"name": "elbo", "num_draws": draws, "complement": False}) for draws in (1, 16))
    ]
    assert found[1]["estimator_variance"] < found[0]["estimator_variance"] / 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_variance_probe_runs_few_completions_without_gradients(
    name: str, policy: Transformer, rollouts: RolloutBatch
) -> None:
    """Three of 36 completions, twice."""
    config = LearnerConfig.model_validate({"algorithm": name, "num_rounds": 1})
    rows: list[int] = []

    def count(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        assert not torch.is_grad_enabled()
        rows.append(len(arguments[0]))

    policy.register_forward_pre_hook(count)
    mask_variance(ShardedPolicy(policy, None), config, SAMPLER, _copies(rollouts))
    batch = GroupedBatch.of(_copies(rollouts).select(torch.tensor([0, 12, 24])))
    most = len(config.estimator.corrupt(batch, InnerUpdate(0, config.inner_updates), SAMPLER).rows)
    assert sum(rows) <= 2 * (most + 3)


@pytest.mark.parametrize(
    "estimator",
    [
        {"name": "one_step", "p_mask_prompt": 0},
        {"name": "trajectory", "num_segments": 2},
        {"name": "trajectory", "steps_per_segment": 1},
    ],
)
def test_the_likelihood_gap_is_estimate_minus_record(
    policy: Transformer, rollouts: RolloutBatch, estimator: dict[str, object]
) -> None:
    config = _config(estimator)
    recorded = [rollouts.commit_logp[row, : rollouts.completion_lengths[row]].mean().item() for row in range(12)]
    estimated = [_estimate(policy, rollouts, config, row, 0) for row in range(12)]
    expected = sum(ours - theirs for ours, theirs in zip(estimated, recorded, strict=True)) / 12
    found = likelihood_gap(ShardedPolicy(policy, None), config, SAMPLER, rollouts)
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(expected) > 0.1


def test_without_reproducible_log_probs_there_is_no_likelihood_gap(policy: Transformer, rollouts: RolloutBatch) -> None:
    config, plain = _config({"name": "one_step"}), ShardedPolicy(policy, None)
    assert likelihood_gap(plain, config, replace(SAMPLER, has_reproducible_logps=False), rollouts) is None
    assert likelihood_gap(plain, config, replace(SAMPLER, temperature=0.0), rollouts) is None
