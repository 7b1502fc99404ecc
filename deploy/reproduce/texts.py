"""Unlabelled text of a task's family: what a base policy is pre-trained on, so that rewards alone have a start.

Answers of the right form to training problems, whose content is nobody's label: a Sudoku's givens are copied and its
empty cells are random digits; Countdown's numbers are joined at random, whatever that comes to.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from random import Random

from rewards import Problem, Split, TaskConfig, make_task
from rewards.data.draw import rng_for
from rewards.data.prompts import demonstration
from rewards.reading.expressions import random_expression, text_of
from rewards.tasks.countdown import CountdownConfig
from rewards.tasks.sudoku import EMPTY, SudokuConfig

_DIGITS = "1234"


def unlabelled(config: TaskConfig, num_problems: int, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` texts of the form of an answer with their prompts: `num_problems` training problems, in turn.

    Raises ValueError for a task that no such text can be made for, and as `Task.problems`.
    """
    write = _writer(config)
    problems = make_task(config).problems(Split.TRAIN, min(num_problems, count), seed)
    rng = rng_for(f"unlabelled/{config.name}/{seed}")
    return [(problem.messages[-1].content, write(problem, rng)) for problem in islice(cycle(problems), count)]


def _writer(config: TaskConfig) -> Callable[[Problem, Random], str]:
    match config:
        case SudokuConfig(prompt="compact"):
            return _sudoku
        case CountdownConfig(prompt="compact"):
            return lambda problem, rng: _countdown(problem, rng, config)
        case _:
            raise ValueError(
                f"there is no unlabelled text for task {config.name}: countdown and sudoku, prompt compact"
            )


def _sudoku(problem: Problem, rng: Random) -> str:
    cells = [rng.choice(_DIGITS) if cell == EMPTY else cell for cell in problem.metadata["puzzle"]]
    return demonstration("compact", reasoning="", answer="".join(cells))


def _countdown(problem: Problem, rng: Random, config: CountdownConfig) -> str:
    numbers = [int(number) for number in problem.metadata["numbers"].split()]
    while (expression := random_expression(rng, numbers, config.operators)) is None:
        pass  # A division with a remainder, or by zero.
    return demonstration("compact", reasoning="", answer=text_of(expression))
