"""Registry of the tasks: the config union and the factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field

from rewards.problem import Task
from rewards.tasks.countdown import Countdown, CountdownConfig
from rewards.tasks.gsm8k import Gsm8k, Gsm8kConfig
from rewards.tasks.humaneval import HumanEval, HumanEvalConfig
from rewards.tasks.jsonl import Jsonl, JsonlConfig
from rewards.tasks.kodcode import Kodcode, KodcodeConfig
from rewards.tasks.math500 import Math500, Math500Config
from rewards.tasks.mbpp import Mbpp, MbppConfig
from rewards.tasks.sudoku import Sudoku, SudokuConfig
from rewards.tasks.sums import Sums, SumsConfig

TaskConfig = Annotated[
    CountdownConfig
    | Gsm8kConfig
    | HumanEvalConfig
    | JsonlConfig
    | KodcodeConfig
    | Math500Config
    | MbppConfig
    | SudokuConfig
    | SumsConfig,
    Field(discriminator="name"),
]
"""The config of any task, discriminated by its `name`."""


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks in alphabetical order."""
    union = get_args(get_args(TaskConfig)[0])
    return tuple(sorted(config.model_fields["name"].default for config in union))


def make_task(config: TaskConfig) -> Task:
    """Create the task of a config."""
    return _TASKS[type(config)](config)


_TASKS: Mapping[type[BaseModel], Callable[[Any], Task]] = {
    CountdownConfig: Countdown,
    Gsm8kConfig: Gsm8k,
    HumanEvalConfig: HumanEval,
    JsonlConfig: Jsonl,
    KodcodeConfig: Kodcode,
    Math500Config: Math500,
    MbppConfig: Mbpp,
    SudokuConfig: Sudoku,
    SumsConfig: Sums,
}
