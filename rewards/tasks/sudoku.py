"""4x4 Sudoku: fill the empty cells so that each row, column and 2x2 box has the digits 1-4."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import comb
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator

from rewards.data.dataset import FileProblems, RuledSources, shuffled_prefix
from rewards.data.prompts import D1_SUDOKU, PromptStyle, format_completion, user_turn
from rewards.data.rows import Row, preview
from rewards.data.sampling import TooFewProblemsError, sample_distinct
from rewards.first_d1 import parsers as d1_parsers
from rewards.parsing.answers import ascii_digits, final_answer, last_answer
from rewards.problem import Grade, Problem, Split

NUM_CELLS = 16
EMPTY = "0"
_PUZZLE = re.compile(r"([0-4]{16})")
_NAMED_PUZZLE = re.compile(r"Sudoku puzzle: ([0-4]{16})")
# Digits that are not cells: `Row 1:`, `the 4x4 grid`.
_LABEL = re.compile(r"\brow\s*[1-4]\b|\b4\s*[x\u00d7]\s*4\b", re.IGNORECASE)
_SOLVED = re.compile(r"[1-4]{16}")


class SudokuConfig(RuledSources):
    """Settings of the Sudoku puzzles."""

    name: Literal["sudoku"] = "sudoku"
    """Selects this task."""
    min_empty: int = Field(default=6, ge=1, le=11)
    """Smallest number of empty cells."""
    max_empty: int = Field(default=10, ge=1, le=11)
    """Largest number of empty cells; at least `min_empty`. Few puzzles with 12 empty cells have a unique solution, and
    none with more."""
    prompt: PromptStyle = "d1"
    """`d1` for the wording of the d1 code, `compact` for the 16 characters of the puzzle alone."""
    heldout_fraction: float = Field(default=0.3, ge=0.05, le=0.5)
    """Fraction of the 288 solved grids that is held out. SPG, which first split by solution, holds out 88."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_empty < self.min_empty:
            raise ValueError(f"max_empty is {self.max_empty}; it must be at least min_empty = {self.min_empty}")
        return self


@cache
def solved_grids() -> tuple[str, ...]:
    """Return all 288 solved grids in ascending order; each is 16 digits 1-4, row by row."""
    rows = ["".join(row) for row in permutations("1234")]
    grids = [""]
    for _ in range(4):
        grids = [grid + row for grid in grids for row in rows if _has_no_conflict(grid + row)]
    return tuple(grids)


def num_solutions(puzzle: str) -> int:
    """Count the solved grids that agree with a puzzle: 16 characters 0-4, row by row, 0 for an empty cell."""
    by_cell = _grids_by_cell()
    agreeing = (1 << len(solved_grids())) - 1
    for cell, digit in enumerate(puzzle):
        if digit != EMPTY:
            agreeing &= by_cell[cell][digit]
    return agreeing.bit_count()


class Sudoku:
    """4x4 Sudoku: fill the empty cells.

    Generated splits share no solved grid; in d1's data all grids occur in both splits.
    """

    name = "sudoku"

    def __init__(self, config: SudokuConfig) -> None:
        self._config = config
        self._files = FileProblems(config, self._problem_of_row, lambda problem: self._key(problem.answer))

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` distinct puzzles of a split, each with one solution, determined by (split, count, seed).

        All numbers of empty cells are equally frequent until the puzzles of one run out. Puzzles from a file are used
        as they are, and the generated split next to it excludes their solutions. Raises ValueError if the split has too
        few puzzles or its file cannot be used.
        """
        if (found := self._files.of(split)) is not None:
            return shuffled_prefix(found, task=self.name, split=split, count=count, seed=seed)
        grids = self._grids(split)
        if not grids:
            raise TooFewProblemsError(task=self.name, split=split, available=0, count=count)
        return sample_distinct(lambda rng: self._draw(rng, grids), task=self.name, split=split, count=count, seed=seed)

    def size(self, split: Split) -> int | None:
        """Return the number of puzzles in the split's file; None if they are generated."""
        found = self._files.of(split)
        return None if found is None else len(found)

    def max_size(self, split: Split) -> int:
        """Return the size of the file; else the number of ways to empty cells, some of which leave several
        solutions."""
        if (found := self._files.of(split)) is not None:
            return len(found)
        num_empty = range(self._config.min_empty, self._config.max_empty + 1)
        return len(self._grids(split)) * sum(comb(NUM_CELLS, count) for count in num_empty)

    def warnings(self) -> list[str]:
        """Return sentences on what was left out of the files read so far."""
        return self._files.warnings

    def example(self) -> Problem:
        """Return the first training problem of seed 0."""
        return self.problems(Split.TRAIN, 1, seed=0)[0]

    def grade(self, problem: Problem, text: str) -> Grade:
        """Give the fraction of the originally empty cells that are right: d1's `sudoku_reward_func`. Never raises.

        The cells are the digits of the answer, truncated to 16; missing ones are wrong. The fixed rules take the answer
        from `final_answer` and the digits 0-9. d1's reward takes the last `<answer>` and every Unicode digit. As in d1,
        a changed given costs no reward. One part: `cells`. `correct` requires exactly the 16 digits of the solution by
        the fixed protocol, and only the empty cells by d1's. Accuracy counts cells: `items`.
        """
        answer, cells = _fixed_cells(text)
        rewarded = cells if self._config.reward == "fixed" else _d1_reward_cells(text)
        counted = cells if self._config.protocol == "fixed" else d1_parsers.sudoku_cells(text)
        empty = [cell for cell, digit in enumerate(problem.metadata["puzzle"]) if digit == EMPTY]
        reward = _num_right(rewarded, problem.answer, empty) / len(empty)
        num_right = _num_right(counted, problem.answer, empty)
        is_d1 = self._config.protocol == "d1"
        return Grade(
            reward=reward,
            parts={"cells": reward},
            correct=num_right == len(empty) if is_d1 else cells == problem.answer,
            answer=(counted or None) if is_d1 else answer,
            items=(num_right, len(empty)),
        )

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem whose question has its 16 characters and whose truth is the solved grid. Raises
        ValueError."""
        found = _PUZZLE.match(question) or _NAMED_PUZZLE.search(question)
        if found is None:
            raise ValueError(
                f"the question {preview(question)} has no puzzle; it should begin with its 16 digits, or say "
                "`Sudoku puzzle: ` before them"
            )
        return replace(self._make_problem(*_checked(found[1], truth)), messages=user_turn(question))

    def _problem_of_row(self, row: Row) -> Problem:
        """Return the problem of a row with `Puzzle` and `Solution`, as in d1's files and on the hub
        (Mayfull/sudoku)."""
        try:
            return self._make_problem(*_checked(row.text("Puzzle"), row.value("Solution")))
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}".replace(f"{row.place}: {row.place}", row.place)) from error

    def _grids(self, split: Split) -> list[str]:
        """Return the solutions of a generated split."""
        fraction = self._config.heldout_fraction
        return [grid for grid in solved_grids() if self._files.belongs_to(split, self._key(grid), fraction)]

    def _key(self, grid: str) -> str:
        return f"{self.name}/{grid}"

    def _draw(self, rng: Random, grids: list[str]) -> Problem:
        solution = rng.choice(grids)
        num_empty = rng.randint(self._config.min_empty, self._config.max_empty)
        puzzle = _dig(rng, solution, num_empty)
        while num_solutions(puzzle) > 1:
            puzzle = _dig(rng, solution, num_empty)
        return self._make_problem(puzzle, solution)

    def _make_problem(self, puzzle: str, solution: str) -> Problem:
        question = f"{D1_SUDOKU}\n\nSolve the following Sudoku puzzle: {puzzle}\n"
        rows = range(0, NUM_CELLS, 4)
        reasoning = "\n".join(f"{puzzle[row : row + 4]} -> {solution[row : row + 4]}" for row in rows)
        return Problem(
            problem_id=f"{self.name}/{puzzle}",
            messages=user_turn(puzzle if self._config.prompt == "compact" else question),
            answer=solution,
            reference_completion=format_completion(self._config.prompt, reasoning=reasoning, answer=solution),
            metadata={"puzzle": puzzle},
        )


def _checked(puzzle: str, solution: object) -> tuple[str, str]:
    """Validate a puzzle and its solution. Raises ValueError if they are not a puzzle and its solved grid."""
    if not _PUZZLE.fullmatch(puzzle) or EMPTY not in puzzle:
        raise ValueError(f"the puzzle is {preview(puzzle)}; it should be 16 digits 0-4, 0 for each empty cell")
    if not isinstance(solution, str) or not _SOLVED.fullmatch(solution):
        raise ValueError(f"the solution is {preview(solution)}; it should be the 16 digits 1-4 of the solved grid")
    if any(given not in (EMPTY, digit) for given, digit in zip(puzzle, solution, strict=True)):
        raise ValueError(f"the solution {solution} changes a given of the puzzle {puzzle}")
    return puzzle, solution


def _fixed_cells(text: str) -> tuple[str | None, str]:
    """Return the answer and its digits."""
    answer = final_answer(text)
    return answer, ascii_digits(_LABEL.sub(" ", answer or ""))


def _d1_reward_cells(text: str) -> str:
    return "".join(character for character in last_answer(text) or "" if character.isdigit())


def _num_right(cells: str, solution: str, empty: list[int]) -> int:
    return sum(cells[cell : cell + 1] == solution[cell] for cell in empty)


def _has_no_conflict(cells: str) -> bool:
    """Return whether the first rows of a grid, each with four different digits, repeat no digit in a column or box."""
    columns = [cells[column::4] for column in range(4)]
    boxes = [cells[i : i + 2] + cells[i + 4 : i + 6] for i in (0, 2, 8, 10)]
    return all(len(set(unit)) == len(unit) for unit in columns + boxes)


@cache
def _grids_by_cell() -> tuple[dict[str, int], ...]:
    """Return for each cell and digit the set of solved grids with that digit there: bit i is grid i of
    `solved_grids()`."""
    by_cell = tuple(dict.fromkeys("1234", 0) for _ in range(NUM_CELLS))
    for i, grid in enumerate(solved_grids()):
        for cell, digit in enumerate(grid):
            by_cell[cell][digit] |= 1 << i
    return by_cell


def _dig(rng: Random, solution: str, num_empty: int) -> str:
    """Return the solution with `num_empty` random cells emptied."""
    empty = set(rng.sample(range(NUM_CELLS), num_empty))
    return "".join(EMPTY if cell in empty else digit for cell, digit in enumerate(solution))
