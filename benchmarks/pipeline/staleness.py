"""Effect of policy lag (staleness) on learning: held-out accuracy by round, staleness and seed.

    python -m benchmarks.pipeline.staleness [--staleness 0 1 2] [--seeds 0 1 2] [--recipe FILE] [--out FILE] [KEY=VALUE]

It trains the recipe's rounds in one process on one thread, from the recipe's SFT checkpoint with its learning rates.
Each round is sampled by the policy of S rounds before, the maximum that `learner.max_staleness` S allows. The time that
asynchronous sampling saves is measured by `benchmarks.pipeline.overlap`. The gap is the mean difference between a
token's recorded log-probability and the learner's, in nats, over the last half of the rounds. Results are saved in
`--out`, one line per run, and a second call resumes from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.algorithms.local_run import LocalRun, make_sft_checkpoint
from deploy.recipe.overrides import load_recipe

_TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
_GAP = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Learning curve of one run."""

    staleness: int
    seed: int
    accuracy: dict[int, float]
    """Percent of the held-out problems at the recipe's first schedule, by rounds trained, 0 first."""
    gap: float
    """Likelihood gap, nats per token."""
    cpu_s: float
    """CPU seconds of sampling, grading and updating."""


def learned(recipe_path: Path, overrides: Iterable[str], staleness: int, seed: int, every: int) -> Curve:
    """Train all rounds of a recipe on completions that are `staleness` versions old, evaluating each `every` rounds."""
    name = f"staleness-{seed}"
    recipe = load_recipe(recipe_path, [f"seed={seed}", f"name={name}", "learner.num_workers=1", *overrides])
    schedule = recipe.evaluation.params(recipe.rollout.sampling)[0]
    run = LocalRun(recipe, make_sft_checkpoint(recipe), staleness)

    def accuracy() -> float:
        ((score, _),) = run.evaluate([schedule]).values()
        return round(100 * score.num_correct / score.num_problems, 2)

    by_round, gaps, cpu_s = {0: accuracy()}, [], 0.0
    for trained in run.rounds():
        gaps.append(trained.metrics[_GAP])
        cpu_s = trained.cpu_s
        if trained.num_rounds % every == 0 or trained.num_rounds == recipe.learner.num_rounds:
            by_round[trained.num_rounds] = accuracy()
        if trained.num_rounds == recipe.learner.num_rounds:
            break
    gap = statistics.fmean(gaps[len(gaps) // 2 :])
    return Curve(staleness=staleness, seed=seed, accuracy=by_round, gap=round(gap, 5), cpu_s=round(cpu_s, 1))


def table(curves: Iterable[Curve]) -> Table:
    """Build a table with a row for each run, and the mean of each staleness that has several seeds."""
    rows = sorted(curves, key=lambda curve: (curve.staleness, curve.seed))
    rounds = sorted({index for curve in rows for index in curve.accuracy})
    shown = Table(*("staleness", "seed", *(f"round {index}" for index in rounds), "gap, nats", "CPU-s"))
    for curve in rows:
        accuracies = [f"{curve.accuracy[index]:.1f}" if index in curve.accuracy else "" for index in rounds]
        shown.add_row(str(curve.staleness), str(curve.seed), *accuracies, f"{curve.gap:.4f}", f"{curve.cpu_s:.0f}")
    for staleness in sorted({curve.staleness for curve in rows}):
        same = [curve for curve in rows if curve.staleness == staleness]
        if len(same) > 1:
            shown.add_row(str(staleness), "mean", *_means(same, rounds), f"{_mean([c.gap for c in same]):.4f}", "")
    return shown


def _means(curves: list[Curve], rounds: list[int]) -> Iterator[str]:
    for index in rounds:
        values = [curve.accuracy[index] for curve in curves if index in curve.accuracy]
        yield f"{_mean(values):.1f}" if len(values) == len(curves) else ""


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def read(path: Path) -> list[Curve]:
    """Read the runs in a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [json.loads(line) for line in lines]
    return [
        Curve(**one | {"accuracy": {int(index): value for index, value in one["accuracy"].items()}}) for one in found
    ]


def main() -> None:
    """Train the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    parser.add_argument("--recipe", type=Path, default=_TINY)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=50, help="rounds between two evaluations")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    curves = read(args.out)
    for seed in args.seeds:
        for staleness in args.staleness:
            if any((curve.staleness, curve.seed) == (staleness, seed) for curve in curves):
                continue
            curves.append(learned(args.recipe, args.overrides, staleness, seed, args.every))
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(curves[-1])) + "\n")
    Console(width=160).print(table(curves))


if __name__ == "__main__":
    main()
