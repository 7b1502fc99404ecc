"""Evaluation cells: one task at one length and schedule, built from the command line options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from deploy.errors import UserError
from deploy.offline.evaluation.options import EvaluationOptions, Params, params_for, temperature_of
from deploy.offline.tasks import task_config
from deploy.recipe.recipe import Recipe
from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig
from rewards import TaskConfig
from rewards.first_d1 import evaluation as first_d1
from rewards.problem import GradingRules


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One row of the results table: a task, its sampling parameters and problems."""

    task: TaskConfig
    """Task whose held-out problems are evaluated."""
    protocol: GradingRules
    """Evaluation protocol. `d1` also uses the prompts of the first d1."""
    params: Params
    """Sampling parameters of the completions."""
    num_problems: int | None
    """Number of problems; None: all of a dataset, or the default of `problems.py` for generated ones."""
    num_samples: int
    """Completions per problem."""
    seed: int
    """Seed of the sampling."""

    @property
    def name(self) -> str:
        """File name of its record, without suffix."""
        rules = "" if self.protocol == "fixed" else f".{self.protocol}"
        drawn = f".{self.num_samples}-samples" if self.num_samples > 1 else ""
        if self.temperature:
            drawn = f".{self.num_samples}-at-{self.temperature:g}"
        schedule = re.sub(r"[^A-Za-z0-9.]+", "-", self.params.schedule_name)
        return f"{self.task.name}{rules}.{self.params.gen_length}.{schedule}{drawn}"

    @property
    def temperature(self) -> float | None:
        """Sampling temperature; None if it decreases from step to step."""
        return temperature_of(self.params)

    def facts(self) -> dict[str, Any]:
        """Return all settings that determine the answers, as JSON."""
        facts: dict[str, Any] = TypeAdapter(Cell).dump_python(self, mode="json")
        return facts


def cells_of(options: EvaluationOptions, run: Recipe | None, policy: TransformerConfig | RenoisingConfig) -> list[Cell]:
    """Build a cell for each task, length and schedule, in that order. The checkpoint's run supplies the defaults.

    Raises UserError if a task, field, length or schedule does not exist, or they are inconsistent.
    """
    configs = _task_configs(options, run)
    own = None if run is None else run.task.name
    params = params_for(options, run, policy)
    # The protocol of the first d1 has its own number of problems.
    counted = None if run is None or options.protocol == "d1" else run.evaluation.num_problems
    cells = [
        Cell(
            task=config,
            protocol=options.protocol,
            params=each,
            num_problems=options.num_problems or (counted if config.name == own else None),
            num_samples=options.num_samples,
            seed=options.seed,
        )
        for config in configs
        for each in params
    ]
    # Schedules may coincide, such as 0.5 and steps=5 of ten slots: evaluate them once.
    return list({cell.name: cell for cell in cells}.values())


def _task_configs(options: EvaluationOptions, run: Recipe | None) -> list[TaskConfig]:
    if options.tasks is None and run is None:
        raise UserError("say which tasks, as in --tasks countdown,sudoku; `d1 tasks` lists them")
    names = options.tasks or ((run.task.name,) if run is not None else ())
    if strays := [text for text in options.fields if text.partition(".")[0] not in names]:
        raise UserError(f"{strays[0]} is a field of none of the tasks {', '.join(names)}; write TASK.KEY=VALUE")
    return [_task_config(name, options, run) for name in dict.fromkeys(names)]


def _task_config(name: str, options: EvaluationOptions, run: Recipe | None) -> TaskConfig:
    """Build the config of a task: the run's fields for its own task, and the prompts of d1 under protocol d1."""
    fields = [text.partition(".")[2] for text in options.fields if text.startswith(f"{name}.")]
    rules: list[str] = []
    if options.protocol == "d1":
        if name not in first_d1.TASKS:
            raise UserError(f"the first d1 evaluates {', '.join(first_d1.TASKS)}; leave out {name}, or --protocol d1")
        rules = ["protocol=d1", "prompt=compact"]
    # This includes the split: training problems must not be evaluated.
    is_own = run is not None and run.task.name == name
    given = run.task.model_dump(mode="json", exclude={"name"}, exclude_unset=True) if run and is_own else {}
    return task_config(name, [*fields, *rules], given)
