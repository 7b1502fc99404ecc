"""Held-out accuracy of a run's checkpoints under other denoise schedules than the one it was trained with.

    python -m benchmarks.schedules RUN_DIRECTORY [STEPS ...]

Reinforcement learning improves the policy on the schedule it samples with; this shows what it does to the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from actors.grader import GraderWorker
from actors.plan import RunPlan
from benchmarks.algorithms.local_run import score
from benchmarks.algorithms.report import in_words
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import make_spec
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer


def main() -> None:
    """Print one row for each checkpoint of the run and one column for each number of denoise steps."""
    run_dir = Path(sys.argv[1]).resolve()
    recipe = load_recipe(run_dir / "recipe.yaml", [f"runs_dir={run_dir.parent}"])
    spec = make_spec(recipe, Stages.ALL)
    sampling = recipe.rollout.sampling
    steps = [int(word) for word in sys.argv[2:]] or [sampling.num_denoise_steps, sampling.gen_length]
    plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
    grader = GraderWorker(spec.task, spec.reward, spec.initial_checkpoint)
    table = Table("checkpoint", *(f"{count} steps" for count in steps), title=f"{recipe.name}: held-out accuracy")
    for directory in sorted(path.parent for path in spec.checkpoints_dir.glob("*/trainer_state.json")):
        policy = load_policy(directory)
        cells = []
        for count in steps:
            result, _ = score(policy, plan, grader, sampling.model_copy(update={"num_denoise_steps": count}))
            cells.append(in_words(result))
        table.add_row(directory.name, *cells)
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
