"""Likelihood probes on a few completions: the sampler-learner gap, and the variance over masks.

Shape letters: B rows of this rank, N terms.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from learner.advantages import Filters
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, Terms, TrajectoryConfig
from learner.objectives import ClippedRatioConfig
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round, StepPlan, scored_logps
from learner.seeds import fold

_NUM_PROBED = 8
_ROWS_FOR_EACH = 12
_REDRAWN_KEY = 71
_TWO_STATES = TrajectoryConfig(steps_per_segment=1, law="sampler", num_sampled=2)
_PLAIN = ClippedRatioConfig()


def sampling_gap(
    policy: ShardedPolicy, config: LearnerConfig, sampler: SamplerFacts, batch: RolloutBatch
) -> dict[str, float]:
    """Compare the sampler's recorded log-probabilities with this policy's, at two steps of a few completions.

    For an exact sampler with the same weights the difference is rounding noise; stale weights or another precision
    increase it. Under LoRA `sampling/adapter_share` is measured too. Empty if the sampler's record does not replay. A
    collective.
    """
    if not sampler.has_reproducible_logps or sampler.temperature == 0:
        return {}
    exact = config.model_copy(update={"estimator": _TWO_STATES, "filters": Filters(), "objective": _PLAIN})
    probe = Round(policy, exact, sampler, _some(batch, _NUM_PROBED))
    plan = probe.plan(0)
    ours_N = scored_logps(policy, plan)
    sampled_N = probe.logps(plan.terms, ours_N, ours_N, None).sampled
    gap_N = (ours_N - sampled_N).abs()
    # Importance is each token's share of all tokens, on all ranks; 0 for a rank without any.
    mean = policy.sum_over_ranks((gap_N * plan.terms.importance).sum()[None]).item()
    most = policy.max_over_ranks((gap_N * (plan.terms.importance > 0)).max()[None]).item()
    gap = {"sampling/sampling_logp_difference/mean": mean, "sampling/sampling_logp_difference/max": most}
    return gap | _delivered_share(policy, plan, ours_N, sampled_N)


def _delivered_share(policy: ShardedPolicy, plan: StepPlan, ours_N: Tensor, sampled_N: Tensor) -> dict[str, float]:
    """Regress the sampler's change in log-probability since the stage began on the learner's: `sampling/adapter_share`.

    The slope is 1 if the sampler has the adapter, and 0 if it has lost it. Absent without an adapter, or as long as the
    adapter has no effect. Its accuracy grows with the change relative to rounding. A collective.
    """
    if not policy.lora.rank or not policy.has_learned:
        return {}
    with policy.disable_adapters():
        start_N = scored_logps(policy, plan)
    ours, theirs, weight_N = ours_N - start_N, sampled_N - start_N, plan.terms.importance
    sums = torch.stack(((weight_N * theirs * ours).sum(), (weight_N * ours * ours).sum()))
    shared, total = policy.sum_over_ranks(sums).tolist()
    return {"sampling/adapter_share": shared / total} if total else {}


def mask_variance(
    policy: ShardedPolicy, config: LearnerConfig, sampler: SamplerFacts, batch: RolloutBatch
) -> dict[str, float]:
    """Measure `estimator_variance`: the variance of a completion's estimate over its random masks, nats squared.

    The estimate is the mean log-probability of a token, weighted as the estimator weighs it. The variance is averaged
    over completions. A few completions are scored under two further draws: the inner updates of a round have different
    masks too, but the policy moves between them, and many methods have one update only.

    It costs two forwards of every canvas of 8 completions, or of one in twelve if that is fewer. At one inner update
    without old and reference likelihoods, whose backward costs two forwards, that is at most 6 % of the round; at
    diffu-GRPO's twelve, less than 1 %. An estimator without random masks costs nothing and has variance 0. A
    collective.
    """
    some = _some(batch, min(_NUM_PROBED, -(-batch.num_rows // _ROWS_FOR_EACH)))
    plain = config.model_copy(update={"filters": Filters(), "objective": _PLAIN})
    plans = [Round(policy, plain, sampler, _redrawn(some, draw)).plan(0) for draw in (0, 1)]
    first, second = plans
    if not policy.max_over_ranks(torch.tensor([int(not _are_equal(first.terms, second.terms))])).item():
        return {"estimator_variance": 0.0}
    (sums_B, weights_B), (others_B, other_weights_B) = (_row_sums(policy, plan, some.num_rows) for plan in plans)
    # A draw that masks no token of a short completion gives no estimate of it.
    both_B = (weights_B > 0) & (other_weights_B > 0)
    difference_B = (sums_B / weights_B - others_B / other_weights_B)[both_B]
    # The unbiased variance of two draws a and b is (a - b)^2 / 2.
    found = torch.stack((difference_B.square().sum() / 2, both_B.float().sum()))
    total, count = policy.sum_over_ranks(found).tolist()
    return {"estimator_variance": total / count} if count else {}


def likelihood_gap(
    policy: ShardedPolicy, config: LearnerConfig, sampler: SamplerFacts, batch: RolloutBatch
) -> float | None:
    """Measure how much larger the estimator's log-likelihood is than the one that the sampler recorded.

    It is the difference of the mean log-probabilities of a token, in nats, averaged over completions; rounding noise if
    the likelihood is exact. None if the sampler's record does not replay. It costs a forward of every canvas of the
    batch. A collective.
    """
    if not sampler.has_reproducible_logps or sampler.temperature == 0:
        return None
    work = Round(policy, config.model_copy(update={"filters": Filters(), "objective": _PLAIN}), sampler, batch)
    sums_B, weights_B = _row_sums(policy, work.plan(0), work.batch.num_rows)
    is_text_BL = work.batch.completion_mask()
    recorded_B = (work.batch.commit_logp * is_text_BL).sum(dim=1) / is_text_BL.sum(dim=1).clamp(min=1)
    is_scored_B = weights_B > 0
    gap_B = (sums_B / weights_B - recorded_B)[is_scored_B]
    total, count = policy.sum_over_ranks(torch.stack((gap_B.sum(), is_scored_B.float().sum()))).tolist()
    return total / count if count else None


def _some(batch: RolloutBatch, count: int) -> RolloutBatch:
    """Select at most `count` rows, evenly spread over the batch."""
    count = min(count, batch.num_rows)
    return batch.select(torch.arange(count) * batch.num_rows // count)


def _redrawn(batch: RolloutBatch, draw: int) -> RolloutBatch:
    """Return the same completions with keys that are used for nothing else, so that their masks are independent."""
    keys = [fold(key, _REDRAWN_KEY, draw) for key in batch.sample_keys.tolist()]
    return replace(batch, sample_keys=torch.tensor(keys, device=batch.sample_keys.device))


def _are_equal(ours: Terms, theirs: Terms) -> bool:
    """Return whether two draws run the same canvases and score the same slots."""
    if ours.views.ids.shape != theirs.views.ids.shape or ours.num_terms != theirs.num_terms:
        return False
    pairs = [(ours.views.ids, theirs.views.ids)]
    pairs += [(getattr(ours, name), getattr(theirs, name)) for name in ("rows", "slots", "weights", "importance")]
    return all(torch.equal(one, other) for one, other in pairs)


def _row_sums(policy: ShardedPolicy, plan: StepPlan, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sum each row's weighted log-probabilities, [B], and their weights, [B]."""
    terms, logps_N = plan.terms, scored_logps(policy, plan)
    weight_N = terms.token_weights * terms.importance
    zeros_B = logps_N.new_zeros(num_rows)
    return zeros_B.index_add(0, terms.rows, weight_N * logps_N), zeros_B.index_add(0, terms.rows, weight_N)
