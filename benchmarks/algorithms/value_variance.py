"""Variance of the policy gradient: a value model's step-level advantages against the group's, at equal rollouts.

    python -m benchmarks.algorithms.value_variance [--recipe recipes/sums.yaml] [--rounds 50 100 200] [--batches 48]

A run trains the policy by the exact trajectory (`cj-grpo`) with a value model. After the given rounds the
policy samples batches that nothing is trained on. Each batch gives two gradients of the same completions: with their
group's z-scores, and with the value model's advantages. The table has tr(S) / |G|^2, the variance of a batch's gradient
over the squared mean gradient (the gradient noise scale in batches; McCandlish et al., arXiv 1812.06162).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.algorithms.local_run import LocalRun, make_sft_checkpoint
from benchmarks.algorithms.report import Budget
from benchmarks.algorithms.trial import Trial, base_recipe, recipe_of
from learner.batch import RolloutBatch
from learner.learner import Learner
from learner.optimizer import StepResult
from learner.parallel.sharding import ShardedPolicy

_UNUSED_ROUNDS = 1_000_000
"""Rounds from this one on are not trained on."""


class Noise(NamedTuple):
    """Signal and noise of the gradients of several batches."""

    variance: float
    """tr(S): the variance of a batch's gradient, summed over parameters."""
    signal: float
    """|G|^2: the squared norm of the mean gradient, unbiased."""

    @property
    def scale(self) -> float:
        """Variance over signal; infinite if the signal is lost in the noise."""
        return self.variance / self.signal if self.signal > 0 else float("inf")

    @classmethod
    def of(cls, gradients: list[Tensor]) -> Noise:
        """Estimate both from gradients of independent batches."""
        stacked = torch.stack(gradients).double()
        mean, count = stacked.mean(dim=0), len(gradients)
        variance = float((stacked - mean).square().sum()) / (count - 1)
        return cls(variance=variance, signal=float(mean.square().sum()) - variance / count)


class _Recorder:
    """A fake optimizer: keeps the gradient of each step and takes none."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self._parameters = policy.trained_parameters.values()
        self.gradients: list[Tensor] = []

    def rollback(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, _lr: float, _max_grad_norm: float, loss: Tensor) -> StepResult:
        grads = [one.grad for one in self._parameters if one.grad is not None]
        self.gradients.append(torch.cat([grad.flatten() for grad in grads]))
        for one in self._parameters:
            one.grad = None
        return StepResult(loss=loss.item(), grad_norm=0.0)


@contextmanager
def _recording(learner: Learner, *, with_value: bool) -> Iterator[list[Tensor]]:
    """Record the policy's gradients within the block, in place of any training."""
    optimizer, value = learner.optimizer, learner.value
    assert value is not None
    values_optimizer = value.optimizer
    recorder = _Recorder(learner.policy)
    learner.optimizer = recorder  # type: ignore[assignment]
    value.optimizer = _Recorder(value.network)  # type: ignore[assignment]
    learner.value = value if with_value else None
    try:
        yield recorder.gradients
    finally:
        learner.optimizer, learner.value, value.optimizer = optimizer, value, values_optimizer


def gradients(learner: Learner, batches: list[RolloutBatch], *, with_value: bool) -> list[Tensor]:
    """Compute the policy's gradient on each batch, flattened, without a step."""
    with _recording(learner, with_value=with_value) as found:
        for batch in batches:
            learner.update(batch, 0)
    return found


def main() -> None:
    """Train, measure after the given rounds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/sums.yaml"))
    parser.add_argument("--rounds", nargs="+", type=int, default=[50, 100, 200], help="when to measure")
    parser.add_argument("--batches", type=int, default=48, help="batches of 256 completions")
    parser.add_argument("--rate", type=float, default=0.25, help="multiple of the recipe's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the recipe")
    parser.add_argument("--out", type=Path, default=Path("runs/value_variance"), help="where the SFT checkpoint goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trial = Trial(
        task=args.recipe.stem,
        recipe=str(args.recipe),
        row="cj-grpo",
        seed=args.seed,
        out=str(args.out.resolve()),
        rate=args.rate,
        overrides=("learner.value={}", *args.set),
    )
    base = base_recipe(trial)
    run = LocalRun(recipe_of(trial, base, Budget(num_completions=1, cpu_s=1, of_round=256)), make_sft_checkpoint(base))
    console = Console(width=120)
    table = Table("round", "explained variance", "noise, group", "noise, value", "group / value", "cosine")
    for trained in run.rounds():
        if trained.num_rounds not in args.rounds:
            continue
        batches = [run.sample(_UNUSED_ROUNDS + index) for index in range(args.batches)]
        of_group, of_value = (gradients(run.learner, batches, with_value=has) for has in (False, True))
        group, value = Noise.of(of_group), Noise.of(of_value)
        mean_of_group, mean_of_value = (torch.stack(some).mean(dim=0) for some in (of_group, of_value))
        cosine = torch.nn.functional.cosine_similarity(mean_of_group, mean_of_value, dim=0).item()
        explained = trained.metrics["value/explained_variance"]
        ratio = group.scale / value.scale
        numbers = (explained, group.scale, value.scale, ratio, cosine)
        table.add_row(str(trained.num_rounds), *(f"{number:.2f}" for number in numbers))
        console.print(f"round {trained.num_rounds} of {max(args.rounds)} measured")
        if trained.num_rounds >= max(args.rounds):
            break
    console.print(table)


if __name__ == "__main__":
    main()
