"""Group-relative advantages, and filters of the completions that are trained on.

Shape letters: B rows, G groups, K parts of a reward, T denoise steps of the longest trajectory, S of a whole canvas, N
values of all steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from learner.batch import RolloutBatch
from learner.estimators.base import SamplerFacts
from learner.model.deferred import torch
from learner.objectives.units import group_softmax

if TYPE_CHECKING:
    from torch import Tensor

_STD_FLOOR = 1e-4


class Advantage(StrEnum):
    """The advantage estimator: how a group's rewards become advantages."""

    GROUP_MEAN = "group_mean"
    """Reward minus the group's mean (d1; Dr. GRPO, arXiv 2503.20783)."""
    GROUP_Z = "group_z"
    """... divided by the group's standard deviation (GRPO, arXiv 2402.03300)."""
    ROUND_Z = "round_z"
    """... divided by the standard deviation over the round (REINFORCE++ with a group baseline, arXiv 2501.03262).
    Steps do not shrink when rewards differ little, and low-variance groups are not scaled up to the weight of others.
    """
    LEAVE_ONE_OUT = "leave_one_out"
    """Reward minus the mean of the others (RLOO, arXiv 2402.14740)."""
    SOFTMAX_PAIR = "softmax_pair"
    """softmax(A) - softmax(-A) over the group, A the reward minus the mean (wd1, arXiv 2507.08838)."""
    PART_Z = "part_z"
    """Sum of the `group_z` of each part of the reward, so that parts of different scales weigh the same (LightningRL).
    """
    ROUND_PART_Z = "round_part_z"
    """... divided by its standard deviation over the round (LightningRL's configuration, after NVIDIA's GDPO, arXiv
    2601.05242): the step size does not depend on the number of parts."""
    CORRECT_Z = "correct_z"
    """`group_z` of 1 for a correct completion and 0 for others, whatever their rewards (TraceRL)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of a round's completions, with their parts, correctness and groups."""

    total: Tensor
    """[B] float32."""
    parts: Tensor
    """[B, K] float32."""
    correct: Tensor
    """[B] bool: the answer is right."""
    groups: Tensor
    """[B] int64; rows of one problem share it."""

    @classmethod
    def of(cls, batch: RolloutBatch, *, outcome_only: bool = False) -> Rewards:
        """Take the rewards of a batch. `outcome_only`: without those of single blocks."""
        total = batch.rewards if batch.outcome_rewards is None or not outcome_only else batch.outcome_rewards
        return cls(total=total, parts=batch.reward_parts, correct=batch.correct, groups=batch.group_ids)


class Filters(BaseModel):
    """Filters of the completions that are trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    zero_variance: bool = False
    """Leave out groups without reward variance: their advantages are 0, and they would only add the KL penalty. Under
    `mdpo` and `egspo-sa` their steps can still differ, and are left out too."""
    min_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out groups with a smaller share of correct completions (TraceRL: 0.2)."""
    max_accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Leave out groups with a greater share of correct completions (TraceRL: 0.8)."""
    min_speed_range: Annotated[float, Field(ge=0)] = 0.0
    """Leave out groups whose completions differ by less than this in tokens per forward: they carry no signal about
    speed (LightningRL: 0.01). Needs a schedule with a variable number of denoise steps."""
    first_correct: bool = False
    """Keep the first correct completion of each group alone, and no completion of a group without one (d-OPSD)."""
    truncated: bool = False
    """Leave out completions that reach the length limit without an end of text. They still count in the group's mean.
    """

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why the filters would leave out every completion of such a sampler; None if they would not."""
        if self.min_speed_range and not sampler.has_varying_steps:
            return (
                f"filters.min_speed_range is {self.min_speed_range:g}; the sampler takes equally many steps "
                "for every block: set rollout.sampling.threshold, factor or entropy_bound, or min_speed_range 0"
            )
        return None

    def keeps(self, rewards: Rewards, truncated_B: Tensor, speeds_B: Tensor) -> Tensor:
        """Return the rows that are trained on, [B] bool. `speeds_B` is in tokens per forward."""
        means = _GroupMeans(rewards.groups)
        kept_B = torch.ones_like(rewards.correct)
        accuracy_B = means.of(rewards.correct.float())
        # A share like 1/5 is not exact in floating point.
        kept_B &= (accuracy_B >= self.min_accuracy - 1e-6) & (accuracy_B <= self.max_accuracy + 1e-6)
        if self.zero_variance:
            kept_B &= means.of(((rewards.total - means.of(rewards.total)).abs() > 1e-6).float()) > 0
        if self.min_speed_range:
            kept_B &= means.greatest(speeds_B) + means.greatest(-speeds_B) >= self.min_speed_range - 1e-6
        if self.first_correct:
            place_B = torch.arange(len(kept_B), device=kept_B.device).masked_fill(~rewards.correct, len(kept_B))
            kept_B &= rewards.correct & (place_B == -means.greatest(-place_B))
        return kept_B & ~truncated_B if self.truncated else kept_B


def group_advantages(rewards: Rewards, advantage: Advantage) -> Tensor:
    """Compute the advantages [B]."""
    means = _GroupMeans(rewards.groups)
    if advantage in (Advantage.PART_Z, Advantage.ROUND_PART_Z):
        parts_B = _parts_z(rewards, means)
        return parts_B if advantage is Advantage.PART_Z else _over_the_round(parts_B)
    centred_B = rewards.total - means.of(rewards.total)
    if advantage is Advantage.GROUP_MEAN:
        return centred_B
    if advantage is Advantage.ROUND_Z:
        return _over_the_round(centred_B)
    if advantage is Advantage.LEAVE_ONE_OUT:
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1). The advantage of a single row is 0.
        return centred_B * means.counts_B / (means.counts_B - 1).clamp(min=1)
    if advantage is Advantage.SOFTMAX_PAIR:
        of_groups = means.groups_B, torch.ones_like(centred_B, dtype=torch.bool), means.num_groups
        return group_softmax(centred_B, *of_groups) - group_softmax(-centred_B, *of_groups)
    return _z(rewards.correct.float() if advantage is Advantage.CORRECT_Z else rewards.total, means)


def step_advantages(rewards: Rewards, step_rewards_BT: Tensor, rank_BT: Tensor, gain_coef: float) -> Tensor:
    """Compute an advantage of each denoise step, [B, T]: 0 where there is none (EGSPO-SA, arXiv 2603.12554).

    A step's return is the reward plus `gain_coef` times its gain over the greedy completion of the state before the
    step, divided by 1 + `gain_coef`. Its baseline is the group's mean over the steps of the same rank.

    Args:
        rewards: of the completions.
        step_rewards_BT: rewards of these greedy completions.
        rank_BT: int64, rank of each step in its completion; -1 for those without an advantage.
        gain_coef: weight of the gain.
    """
    total_BT = rewards.total[:, None].expand_as(step_rewards_BT)
    returns_BT = (total_BT + gain_coef * (total_BT - step_rewards_BT)) / (1 + gain_coef)
    is_ranked_BT = rank_BT >= 0
    group_BT = rewards.groups[:, None] * (rank_BT.max() + 1) + rank_BT
    returns_N = returns_BT[is_ranked_BT]
    advantages_BT = torch.zeros_like(step_rewards_BT)
    advantages_BT[is_ranked_BT] = returns_N - _GroupMeans(group_BT[is_ranked_BT]).of(returns_N)
    return advantages_BT


def prediction_advantages(rewards: Rewards, step_rewards_BT: Tensor, num_steps: int) -> Tensor:
    """Compute an advantage of each denoise step, [B, T]: 0 where its answer was not graded (MDPO, arXiv 2508.13148).

    With r(t) the reward of what step t predicts, the step's return is r(t) - r(t-1) plus the mean of the later steps'
    rewards, or r(t) itself after the last. It is normalised over the group's returns at the same step, by the standard
    deviation with one degree of freedom less. This is MDPO's code, without a constant that the mean takes away.

    An answer that was not graded counts as the completion: MDPO denoises whole canvases, and steps after a text's end
    do not change it.

    Args:
        rewards: of the completions.
        step_rewards_BT: rewards of what the steps predict, NaN where nothing was graded.
        num_steps: denoise steps of a whole canvas.
    """
    (B, T), total_B1 = step_rewards_BT.shape, rewards.total[:, None]
    num_steps = max(num_steps, T)
    known_BT = torch.where(step_rewards_BT.isnan(), total_B1, step_rewards_BT)
    known_BS = torch.cat((known_BT, total_B1.expand(B, num_steps - T)), dim=1)
    later_BS = known_BS.clone()
    sums_BS = known_BS.flip(1).cumsum(dim=1).flip(1)
    later_BS[:, :-1] = sums_BS[:, 1:] / torch.arange(num_steps - 1, 0, -1, device=sums_BS.device)
    returns_BS = known_BS.diff(dim=1, prepend=torch.zeros_like(total_B1)) + later_BS
    steps_S = torch.arange(num_steps, device=returns_BS.device)
    means = _GroupMeans((rewards.groups[:, None] * num_steps + steps_S).flatten())
    centred_N = returns_BS.flatten() - means.of(returns_BS.flatten())
    variance_N = means.of(centred_N.square()) * means.counts_B / (means.counts_B - 1).clamp(min=1)
    advantages_BS = (centred_N / (variance_N.sqrt() + _STD_FLOOR)).view(B, num_steps)
    return advantages_BS[:, :T].masked_fill(step_rewards_BT.isnan(), 0.0)


def group_spreads(rewards: Rewards) -> Tensor:
    """Return the standard deviation of each group's rewards, [G]."""
    means = _GroupMeans(rewards.groups)
    variance_B = means.of((rewards.total - means.of(rewards.total)).square())
    return means.one_each(variance_B.sqrt())


def zero_variance_share(rewards: Rewards) -> float:
    """Return the share of groups without reward variance."""
    spread_B = group_advantages(rewards, Advantage.GROUP_MEAN).abs() > 1e-6
    return 1.0 - len(rewards.groups[spread_B].unique()) / len(rewards.groups.unique())


class _GroupMeans:
    """Reductions over groups, broadcast back to their rows."""

    def __init__(self, groups_B: Tensor) -> None:
        _, self.groups_B = groups_B.unique(return_inverse=True)
        counts_G = self.groups_B.bincount()
        self.num_groups = len(counts_G)
        self.counts_B = counts_G[self.groups_B]

    def one_each(self, values_B: Tensor) -> Tensor:
        """Return one value for each group, [G], of values that are equal within each group."""
        return values_B.new_zeros(self.num_groups).scatter_(0, self.groups_B, values_B)

    def of(self, values_B: Tensor) -> Tensor:
        """Return the mean over each row's group, [B]."""
        sums_G = values_B.new_zeros(self.num_groups).index_add_(0, self.groups_B, values_B)
        return sums_G[self.groups_B] / self.counts_B

    def greatest(self, values_B: Tensor) -> Tensor:
        """Return the greatest value of each row's group, [B]."""
        most_G = values_B.new_empty(self.num_groups)
        most_G.scatter_reduce_(0, self.groups_B, values_B, "amax", include_self=False)
        return most_G[self.groups_B]


def _z(rewards_B: Tensor, means: _GroupMeans) -> Tensor:
    centred_B = rewards_B - means.of(rewards_B)
    return centred_B / (means.of(centred_B.square()).sqrt() + _STD_FLOOR)


def _parts_z(rewards: Rewards, means: _GroupMeans) -> Tensor:
    """Sum the z-scores of the parts, [B]."""
    columns = [_z(rewards.parts[:, part], means) for part in range(rewards.parts.shape[1])]
    return torch.stack(columns).sum(dim=0) if columns else torch.zeros_like(rewards.total)


def _over_the_round(centred_B: Tensor) -> Tensor:
    """Divide group-centred values [B] by their standard deviation over the round."""
    return centred_B / (centred_B.square().mean().sqrt() + _STD_FLOOR)
