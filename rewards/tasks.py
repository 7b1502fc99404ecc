"""Which tasks there are: the one place that knows them all."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rewards.countdown import Countdown, CountdownConfig
from rewards.problem import Task
from rewards.sudoku import Sudoku, SudokuConfig
from rewards.sums import Sums, SumsConfig

TaskConfig = Annotated[CountdownConfig | SudokuConfig | SumsConfig, Field(discriminator="name")]
"""The config of any task; its `name` says of which."""


def make_task(config: TaskConfig) -> Task:
    """The task that a config describes."""
    match config:
        case CountdownConfig():
            return Countdown(config)
        case SudokuConfig():
            return Sudoku(config)
        case SumsConfig():
            return Sums(config)
