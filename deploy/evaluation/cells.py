"""Cells of an evaluation's table: a task at a length and a schedule, made of what the command line says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from deploy.errors import UserError
from deploy.evaluation.schedules import Asked, Params, Sampled, params_for, temperature_of
from deploy.grading.tasks import task_config
from deploy.recipe.recipe import Recipe
from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig
from rewards import TaskConfig
from rewards.first_d1 import evaluation as first_d1
from rewards.problem import Rules


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One row of the table."""

    task: TaskConfig
    """Whose held-out problems are asked."""
    protocol: Rules
    """By whose rules: `d1` also asks as the first d1 does."""
    params: Params
    """How a completion is denoised."""
    num_problems: int | None
    """How many are asked; None: all that there are of data, else as many as `problems.py` says."""
    sampled: Sampled
    """How often each."""

    @property
    def name(self) -> str:
        """Of its file."""
        rules = "" if self.protocol == "fixed" else f".{self.protocol}"
        drawn = f".{self.sampled.num_samples}-samples" if self.sampled.num_samples > 1 else ""
        if self.temperature:
            drawn = f".{self.sampled.num_samples}-at-{self.temperature:g}"
        schedule = re.sub(r"[^A-Za-z0-9.]+", "-", self.params.schedule_name)
        return f"{self.task.name}{rules}.{self.params.gen_length}.{schedule}{drawn}"

    @property
    def temperature(self) -> float | None:
        """Of the draws; None where it falls from step to step."""
        return temperature_of(self.params)

    def facts(self) -> dict[str, Any]:
        """What its answers hang on, as JSON."""
        return {
            "task": self.task.model_dump(mode="json"),
            "protocol": self.protocol,
            "params": self.params.model_dump(mode="json"),
            "num_problems": self.num_problems,
            "num_samples": self.sampled.num_samples,
            "seed": self.sampled.seed,
        }


def cells_of(asked: Asked, run: Recipe | None, policy: TransformerConfig | RenoisingConfig) -> list[Cell]:
    """A cell for each task, length and schedule, in that order.

    Args:
        asked: what the command line says.
        run: the recipe of the checkpoint's run, which says what is left out; None where it is of no run.
        policy: the shape of what is evaluated.

    Raises:
        UserError: a task, field, length or schedule that there is not, or that do not fit each other.
    """
    configs = _task_configs(asked, run)
    own = None if run is None else run.task.name
    params = params_for(asked, run, policy)
    # The first d1 asks as many as it asks.
    counted = None if run is None or asked.protocol == "d1" else run.evaluation.num_problems
    cells = [
        Cell(
            task=config,
            protocol=asked.protocol,
            params=each,
            num_problems=asked.num_problems or (counted if config.name == own else None),
            sampled=asked.sampled,
        )
        for config in configs
        for each in params
    ]
    # What is named twice, as in 0.5 and steps=5 of ten slots, is asked once.
    return list({cell.name: cell for cell in cells}.values())


def _task_configs(asked: Asked, run: Recipe | None) -> list[TaskConfig]:
    if asked.tasks is None and run is None:
        raise UserError("say which tasks, as in --tasks countdown,sudoku; `d1 tasks` lists them")
    names = asked.tasks or ((run.task.name,) if run is not None else ())
    if strays := [text for text in asked.fields if text.partition(".")[0] not in names]:
        raise UserError(f"{strays[0]} is a field of none of the tasks {', '.join(names)}; write TASK.KEY=VALUE")
    return [_task_config(name, asked, run) for name in dict.fromkeys(names)]


def _task_config(name: str, asked: Asked, run: Recipe | None) -> TaskConfig:
    """A run's own task is asked as the run asks it; d1's rules pose it in words of their own."""
    fields = [text.partition(".")[2] for text in asked.fields if text.startswith(f"{name}.")]
    rules: list[str] = []
    if asked.protocol == "d1":
        if name not in first_d1.TASKS:
            raise UserError(f"the first d1 evaluates {', '.join(first_d1.TASKS)}; leave out {name}, or --protocol d1")
        rules = ["protocol=d1", "prompt=compact"]
    # Its split too: what it trained on is not to be asked.
    is_own = run is not None and run.task.name == name
    given = run.task.model_dump(mode="json", exclude={"name"}, exclude_unset=True) if run and is_own else {}
    return task_config(name, [*fields, *rules], given)
