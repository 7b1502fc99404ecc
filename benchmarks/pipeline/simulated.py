"""Helpers for simulated runs: a run directory, and grades of fictitious completions."""

from __future__ import annotations

from pathlib import Path

from actors.messages import WorkUnit, WorkUnitSummary
from actors.spec import RunSpec
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import create_run_dir, make_spec
from rewards import Grade

NO_REGISTRY = "redis://127.0.0.1:1/0"
"""Address without a listening registry."""
_RECIPE = Path(__file__).parents[2] / "recipes" / "chaos.yaml"


def make_run(directory: Path, *overrides: str) -> RunSpec:
    """Make a run of the smallest recipe, with its folder below `directory`."""
    recipe = load_recipe(_RECIPE, [f"runs_dir={directory}", "learner.num_workers=1", *overrides])
    spec = make_spec(recipe, Stages.RL)
    create_run_dir(recipe, spec, start_from=None).close()
    return spec


def graded(work_unit: WorkUnit, version: int) -> WorkUnitSummary:
    """Summarise a work unit with every second completion correct."""
    size = len(work_unit.requests)
    return WorkUnitSummary(
        grades=tuple(Grade(reward=float(row % 2), parts={}, correct=row % 2 == 1) for row in range(size)),
        texts=("7",) * size,
        num_tokens=(2,) * size,
        step_maps=((0, 1),) * size,
        num_forwards=(2,) * size,
        policy_versions=(version,) * size,
        failures=(),
        costs={},
    )
