"""Which tasks there are: the one place that knows them all."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from rewards.countdown import Countdown, CountdownConfig
from rewards.gsm8k import Gsm8k, Gsm8kConfig
from rewards.jsonl import Jsonl, JsonlConfig
from rewards.math500 import Math500, Math500Config
from rewards.problem import Task
from rewards.sudoku import Sudoku, SudokuConfig
from rewards.sums import Sums, SumsConfig

TaskConfig = Annotated[
    CountdownConfig | Gsm8kConfig | JsonlConfig | Math500Config | SudokuConfig | SumsConfig,
    Field(discriminator="name"),
]
"""The config of any task; its `name` says of which."""


def task_names() -> tuple[str, ...]:
    """The names of all tasks, in the order of the alphabet."""
    union = get_args(get_args(TaskConfig)[0])
    return tuple(sorted(config.model_fields["name"].default for config in union))


def make_task(config: TaskConfig) -> Task:
    """The task that a config describes."""
    match config:
        case CountdownConfig():
            return Countdown(config)
        case Gsm8kConfig():
            return Gsm8k(config)
        case Math500Config():
            return Math500(config)
        case JsonlConfig():
            return Jsonl(config)
        case SudokuConfig():
            return Sudoku(config)
        case SumsConfig():
            return Sums(config)
