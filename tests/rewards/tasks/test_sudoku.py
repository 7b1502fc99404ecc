"""Tests of the Sudoku task: d1's rewards and prompt, unique solutions, disjoint splits."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from pydantic import ValidationError

from rewards import Problem, Split, Sudoku, SudokuConfig
from rewards.tasks.sudoku import num_solutions, solved_grids

_PUZZLE, _SOLUTION = "3102200002100320", "3142243142131324"  # the first of d1's evaluation set: 8 empty cells

_D1_TURN = """
Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character string reading left-to-right, \
top-to-bottom, where '0' represents empty cells.

Rules:
- Fill empty cells with digits 1-4
- Each row must contain digits 1-4 exactly once
- Each column must contain digits 1-4 exactly once
- Each 2x2 box must contain digits 1-4 exactly once

Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, representing your final \
solved grid.

Respond in this exact format:
<reasoning>
Your step-by-step solving process
</reasoning>
<answer>
[16-character solution string with no spaces or separators]
</answer>


Solve the following Sudoku puzzle: {puzzle}
"""


def _solutions_by_search(puzzle: str) -> int:
    """Count solutions by slow exhaustive search: try all valid digits in the first empty cell."""
    cell = puzzle.find("0")
    if cell < 0:
        return 1
    row, column = divmod(cell, 4)
    peers = {
        puzzle[r * 4 + c]
        for r, c in product(range(4), range(4))
        if r == row or c == column or (r // 2, c // 2) == (row // 2, column // 2)
    }
    fitting = set("1234") - peers
    return sum(_solutions_by_search(puzzle[:cell] + digit + puzzle[cell + 1 :]) for digit in fitting)


@pytest.mark.parametrize(
    ("text", "reward", "correct"),
    [
        (f"<answer>{_SOLUTION}</answer>", 1.0, True),
        (f"<answer>\n{_SOLUTION}\n</answer>", 1.0, True),
        ("<answer>3142\n2431\n4213\n1324</answer>", 1.0, True),
        ("<answer>3 1 4 2 | 2 4 3 1 | 4 2 1 3 | 1 3 2 4</answer>", 1.0, True),
        (
            "<answer>The 4x4 grid is:\nRow 1: 3 1 4 2\nRow 2: 2 4 3 1\nRow 3: 4 2 1 3\nRow 4: 1 3 2 4</answer>",
            1.0,
            True,
        ),
        ("<answer>```\n|3|1|4|2|\n|2|4|3|1|\n|4|2|1|3|\n|1|3|2|4|\n```</answer>", 1.0, True),
        (f"<answer>{_PUZZLE}</answer>", 0.0, False),
        (f"<answer>0000000000000000</answer> so <answer>{_SOLUTION}</answer>", 1.0, True),
        # one empty cell wrong, of eight
        ("<answer>3132243142131324</answer>", 7 / 8, False),
        # short answers are padded, long ones truncated
        ("<answer>31422431</answer>", 4 / 8, False),
        ("<answer>314</answer>", 1 / 8, False),
        (f"<answer>{_SOLUTION}4</answer>", 1.0, False),
        (f"<answer>1{_SOLUTION}</answer>", 0.0, False),
        # a changed given costs nothing, but is not correct
        ("<answer>1142243142131324</answer>", 1.0, False),
        # non-ASCII digits do not count as cells
        (f"<answer>\u00b2{_SOLUTION}</answer>", 1.0, True),
        ("<answer>\u0663142243142131324</answer>", 0.0, False),
        ("<answer></answer>", 0.0, False),
        ("<answer>no idea</answer>", 0.0, False),
        (f"<answer>{_SOLUTION}", 0.0, False),
        (_SOLUTION, 0.0, False),
        ("", 0.0, False),
    ],
)
def test_rewards_equal_d1s(text: str, reward: float, correct: bool) -> None:
    problem = Problem(
        problem_id="p", messages=(), answer=_SOLUTION, reference_completion="", metadata={"puzzle": _PUZZLE}
    )
    grade = Sudoku(SudokuConfig()).grade(problem, text)
    assert (grade.reward, grade.correct) == (reward, correct)
    assert grade.parts == {"cells": reward}


def test_there_are_288_solved_grids() -> None:
    grids = solved_grids()
    assert len(set(grids)) == 288
    assert list(grids) == sorted(grids)
    for grid in grids:
        rows = [grid[i : i + 4] for i in range(0, 16, 4)]
        columns = [grid[i::4] for i in range(4)]
        boxes = [rows[r][c : c + 2] + rows[r + 1][c : c + 2] for r in (0, 2) for c in (0, 2)]
        assert all(sorted(unit) == list("1234") for unit in [*rows, *columns, *boxes])


def test_num_solutions_equals_a_brute_force_search() -> None:
    assert num_solutions("0" * 16) == 288
    assert num_solutions("11" + "0" * 14) == 0
    for problem in Sudoku(SudokuConfig(max_empty=11)).problems(Split.TRAIN, 20, seed=0):
        puzzle = problem.metadata["puzzle"]
        dug = puzzle.replace(puzzle.strip("0")[0], "0")
        assert num_solutions(dug) == _solutions_by_search(dug)
    assert num_solutions("1234" + "0" * 12) == _solutions_by_search("1234" + "0" * 12) == 12


@pytest.mark.parametrize("split", Split)
def test_puzzles_have_one_solution_and_the_configured_empty_cells(split: Split) -> None:
    problems = Sudoku(SudokuConfig(min_empty=5, max_empty=11, validation_fraction=0.2)).problems(split, 150, seed=1)
    for problem in problems:
        puzzle = problem.metadata["puzzle"]
        assert _solutions_by_search(puzzle) == 1
        assert problem.answer in solved_grids()
        assert all(given in ("0", digit) for given, digit in zip(puzzle, problem.answer, strict=True))
    assert {problem.metadata["puzzle"].count("0") for problem in problems} == set(range(5, 12))


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5])
def test_no_solved_grid_is_in_two_splits(fraction: float) -> None:
    sudoku = Sudoku(SudokuConfig(heldout_fraction=fraction, validation_fraction=0.1))
    train, validation, heldout = (
        {problem.answer for problem in sudoku.problems(split, 2_000, seed=0)} for split in Split
    )
    assert train.isdisjoint(heldout)
    assert validation.isdisjoint(train | heldout)
    assert len(train | validation | heldout) == 288
    assert len(heldout) / 288 == pytest.approx(fraction, abs=0.08)
    assert len(validation) / (288 - len(heldout)) == pytest.approx(0.1, abs=0.05)


def test_validation_is_taken_from_training_only() -> None:
    without, with_it = (Sudoku(SudokuConfig(validation_fraction=part)) for part in (0.0, 0.2))
    assert with_it.problems(Split.HELDOUT, 50, seed=0) == without.problems(Split.HELDOUT, 50, seed=0)
    with pytest.raises(ValueError, match=r"^the validation split of sudoku has 0 problems .* but 1 were asked for$"):
        without.problems(Split.VALIDATION, 1, seed=0)


def test_the_d1_prompt_equals_d1s() -> None:
    (problem,) = Sudoku(SudokuConfig()).problems(Split.TRAIN, 1, seed=0)
    (message,) = problem.messages
    assert message.role == "user"
    assert message.content == _D1_TURN.format(puzzle=problem.metadata["puzzle"])
    assert problem.reference_completion.startswith("<reasoning>\n")
    assert problem.reference_completion.endswith(f"\n</reasoning>\n<answer>\n{problem.answer}\n</answer>")


def test_the_compact_prompt_is_the_puzzle() -> None:
    (problem,) = Sudoku(SudokuConfig(prompt="compact")).problems(Split.TRAIN, 1, seed=0)
    assert problem.messages[0].content == problem.metadata["puzzle"]
    assert problem.reference_completion == f"<answer>{problem.answer}</answer>"


def test_an_exhausted_split_says_how_many_puzzles_it_has() -> None:
    sudoku = Sudoku(SudokuConfig(min_empty=1, max_empty=1))
    num_grids = len({problem.answer for problem in sudoku.problems(Split.HELDOUT, 1_000, seed=0)})
    with pytest.raises(ValueError, match=f"^the heldout split of sudoku has {num_grids * 16} problems .* 5000 were"):
        sudoku.problems(Split.HELDOUT, 5_000, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_empty": 8, "max_empty": 7}, "max_empty is 7; it must be at least min_empty = 8"),
        ({"max_empty": 12}, "max_empty"),
        ({"min_empty": 0}, "min_empty"),
        ({"heldout_fraction": 0.0}, "heldout_fraction"),
        ({"size": 9}, "size"),
    ],
)
def test_a_wrong_config_names_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SudokuConfig.model_validate(fields)


def test_generated_puzzles_exclude_the_solutions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("Puzzle,Solution\n0234341221434321,1234341221434321\n1230341221434300,1234341221434321\n")
    task = Sudoku(SudokuConfig(heldout_data=path))
    heldout = task.problems(Split.HELDOUT, 2, seed=0)
    assert {problem.metadata["puzzle"] for problem in heldout} == {"0234341221434321", "1230341221434300"}
    assert all(task.grade(problem, problem.reference_completion).reward == 1 for problem in heldout)
    made = {problem.answer for problem in task.problems(Split.TRAIN, 3000, seed=0)}
    assert len(made) == 287
    assert "1234341221434321" not in made


def test_validation_is_generated_or_taken_from_a_training_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = {
        problem.metadata["puzzle"]: problem.answer for problem in Sudoku(SudokuConfig()).problems(Split.TRAIN, 300, 0)
    }
    path.write_text("Puzzle,Solution\n" + "".join(f"{puzzle},{grid}\n" for puzzle, grid in rows.items()))
    cut = Sudoku(SudokuConfig(train_data=path, validation_fraction=0.2))
    sizes = cut.size(Split.TRAIN), cut.size(Split.VALIDATION)
    assert sum(map(int, filter(None, sizes))) == 300
    train, validation, heldout = (
        {problem.answer for problem in cut.problems(split, size or 500, 0)}
        for split, size in zip(Split, (*sizes, None), strict=True)
    )
    assert len(validation) > 20
    assert validation.isdisjoint(train)
    assert heldout.isdisjoint(train | validation)
    made = Sudoku(SudokuConfig(heldout_data=path, validation_fraction=0.2))
    of_made = [
        {problem.answer for problem in made.problems(split, 200, 0)} for split in (Split.TRAIN, Split.VALIDATION)
    ]
    assert of_made[0].isdisjoint(of_made[1])
    assert set(rows.values()).isdisjoint(of_made[0] | of_made[1])


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("123,1234341221434321", 'row 1: the puzzle is "123"; it should be 16 digits 0-4'),
        ("1234341221434321,1234341221434321", "row 1: the puzzle is .*, 0 for each empty cell"),
        ("0234341221434321,12", 'row 1: the solution is "12"; it should be the 16 digits'),
        ("0234341221434321,1243341221434321", "row 1: the solution 1243341221434321 changes a given"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: str, sentence: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"Puzzle,Solution\n{row}\n")
    with pytest.raises(ValueError, match=sentence):
        Sudoku(SudokuConfig(train_data=path)).problems(Split.TRAIN, 1, seed=0)
