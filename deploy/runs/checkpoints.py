"""Access to a run directory from outside the run: its recipe, and its newest or best checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from actors.checkpoints.best import Evaluations
from actors.checkpoints.selection import (
    FoundCheckpoint,
    is_intermediate,
    newest_checkpoint,
    servable,
    servable_checkpoints,
)
from actors.run_log import CHECKPOINTS, RECIPE, iterate_events
from deploy.errors import UserError, user_errors
from deploy.printing import printable
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Recipe
from learner.model.storage.throughput import ReportProgress


def read_recipe(run_dir: Path) -> Recipe:
    """Read the resolved recipe of a run. Raises UserError if the directory has none, or it is invalid."""
    path = run_dir / RECIPE
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run: it has no {RECIPE}")
    return load_recipe(path, [])


def newest_servable(run_dir: Path, say: ReportProgress | None = None) -> FoundCheckpoint:
    """Find the newest intact checkpoint that a service may use; damaged ones are reported on stderr.

    `say` reports the throughput of reading it. Raises UserError if there is none.
    """
    with user_errors(ValueError):
        found = newest_checkpoint(run_dir / CHECKPOINTS, servable, say)
    if found is None:
        raise UserError(f"{run_dir} has no checkpoint to serve yet")
    for what in found.skipped:
        sys.stderr.write(f"d1: {printable(what)}\n")
    within_stage = [path.name for path in (run_dir / CHECKPOINTS).glob("[!.]*/") if is_intermediate(path)]
    if found.position.policy_version == 0 and within_stage:
        where = printable(f"{run_dir.name}/{max(within_stage)}")
        sys.stderr.write(f"d1: this is the policy before training; the newest checkpoint within a stage is {where}\n")
    return found


def best_servable(run_dir: Path) -> Path:
    """Find the checkpoint that solves most validation problems. Raises UserError if there is none."""
    evaluations = Evaluations(iterate_events(run_dir))
    if not evaluations.has_validation:
        raise UserError(
            f"{run_dir} has no validation results, and held-out problems select no best checkpoint; a recipe with "
            f"task.validation_fraction and evaluation.num_validation has one, and {run_dir.name}/last is the newest"
        )
    version = evaluations.best()
    for position, directory in servable_checkpoints(run_dir / CHECKPOINTS):
        if position.policy_version == version:
            return directory
    raise UserError(f"{run_dir} has no checkpoint of version {version}, its best; {run_dir.name}/last is the newest")
