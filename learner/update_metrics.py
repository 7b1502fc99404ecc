"""Metrics of a round's updates, under TRL's names where it has one.

Shape letters: U units, N terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.advantages import Rewards, group_spreads, zero_variance_share
from learner.batch import RolloutBatch, to_device_async
from learner.objectives import Loss
from learner.optimizer import StepResult
from learner.parallel.sharding import ShardedPolicy

_RATIO = "ratio"
_TRL = {
    _RATIO: "ratio_mean",
    "sampler_ratio": "sampler_ratio_mean",
    "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean",
}


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Compute the metrics of a round's completions; stored ones have no sampler's record and no rewards of a task."""
    rewards, of_steps = Rewards.of(batch), dict[str, float]()
    if batch.step_rewards is not None:
        of_steps["step_gain"] = (batch.rewards[:, None] - batch.step_rewards).nanmean().item()
    lengths_B = batch.completion_lengths.float()
    is_text = batch.completion_mask()
    lengths = {
        "completions/mean_length": lengths_B.mean().item(),
        "completions/max_length": lengths_B.max().item(),
        "completions/clipped_ratio": batch.truncated.float().mean().item(),
    }
    if not (num_forwards := int(batch.num_forwards.sum())):
        return lengths
    return lengths | {
        "reward_std": group_spreads(rewards).mean().item(),
        "frac_reward_zero_std": zero_variance_share(rewards),
        "entropy": (batch.commit_entropy * is_text).sum().item() / is_text.sum().item(),
        "tokens_per_forward": lengths_B.sum().item() / num_forwards,
    }


class UpdateMetrics:
    """Running sums of metrics over the units of all inner updates of a round.

    They stay on the device until they are read, so that the host does not wait for it between micro-batches.
    """

    def __init__(self, policy: ShardedPolicy) -> None:
        self._policy = policy
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._max_ratio = torch.zeros(1, device=policy.device)
        self._update_loss = torch.zeros((), device=policy.device)
        self._grad_norms: list[float] = []
        self._num_imitations = 0
        self._value_steps: list[StepResult] = []
        self._value_metrics: dict[str, float] = {}

    def add(self, loss: Loss, new_N: Tensor | None, *, counts: bool) -> None:
        """Add the metrics of some terms; weightless terms (`counts` is false) add only names, which all ranks share.

        `new_N` are the tokens' log-probabilities; None if the objective uses none.
        """
        weight = float(counts)
        self._update_loss = self._update_loss + weight * loss.total.detach()
        self._add("loss", loss.total.detach()[None] * weight)
        if new_N is not None:
            self._add("token_logp", new_N.detach()[:0] if not counts else new_N.detach())
        for name, values_U in loss.per_unit.items():
            self._add(name, values_U if counts else values_U[:0])
        if counts and _RATIO in loss.per_unit:
            ratio_U = loss.per_unit[_RATIO]
            self._add("ratio_square", ratio_U.square())
            self._max_ratio = self._max_ratio.maximum(ratio_U.max()[None])
        elif _RATIO in loss.per_unit:
            self._add("ratio_square", loss.per_unit[_RATIO][:0])

    def add_imitation(self, loss: Tensor, coefficient: float, *, counts: bool) -> None:
        """Add the denoising loss of some demonstrations."""
        weight = float(counts)
        self._update_loss = self._update_loss + weight * coefficient * loss.detach()
        self._add("loss", loss.detach()[None] * weight * coefficient)
        self._add("imitation_loss", loss.detach()[None] * weight)

    def end_imitation(self) -> None:
        """Count an optimizer step with a denoising loss; not every step has one."""
        self._num_imitations += 1

    def pop_loss(self) -> Tensor:
        """Return the loss [] of the coming optimizer step over all ranks, and reset it for the next."""
        loss = self._policy.sum_over_ranks(self._update_loss[None])[0]
        self._update_loss = torch.zeros_like(self._update_loss)
        return loss

    def add_step(self, grad_norm: float) -> None:
        """Count an optimizer step."""
        self._grad_norms.append(grad_norm)

    def add_value_step(self, step: StepResult) -> None:
        """Count an optimizer step of the value model."""
        self._value_steps.append(step)

    def set_value_metrics(self, metrics: dict[str, float]) -> None:
        """Set the metrics of the value model's predictions, which are over all ranks."""
        self._value_metrics = metrics

    def means(self) -> dict[str, float]:
        """Average the metrics over all ranks; empty if nothing was trained on. A collective."""
        if not self._grad_norms:
            return {}
        num_steps, names = len(self._grad_norms), sorted(self._sums)
        found = torch.stack([self._sums[name] for name in names])
        counts = torch.tensor([self._counts[name] for name in names], dtype=torch.float64)
        totals = self._policy.sum_over_ranks(
            torch.stack((found, to_device_async(counts, found.device)), dim=1)
        ).tolist()
        sums = dict(zip(names, totals, strict=True))
        metrics = {_TRL.get(name, name): total / max(1.0, count) for name, (total, count) in sums.items()}
        if _RATIO in sums:
            total, count = sums[_RATIO]
            metrics["ratio_max"] = self._policy.max_over_ranks(self._max_ratio).item()
            metrics["effective_sample_share"] = total**2 / max(1e-30, metrics.pop("ratio_square") * count**2)
        if "clip_ratio/low" in sums:
            metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        steps = {"loss": num_steps, "imitation_loss": self._num_imitations}
        losses = {name: sums[name][0] / count for name, count in steps.items() if name in sums}
        return metrics | losses | self._of_value() | {"grad_norm": sum(self._grad_norms) / num_steps}

    def _of_value(self) -> dict[str, float]:
        if not self._value_steps:
            return {}
        losses, norms = zip(*self._value_steps, strict=True)
        count = len(self._value_steps)
        return self._value_metrics | {"value/loss": sum(losses) / count, "value/grad_norm": sum(norms) / count}

    def _add(self, name: str, values: Tensor) -> None:
        total = values.double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + len(values)
