"""Tests of the graders on real generations of LLaDA-8B-Instruct, and on d1's evaluation sets."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rewards import (
    Countdown,
    CountdownConfig,
    Gsm8k,
    Gsm8kConfig,
    Math500Config,
    Outcome,
    Problem,
    Split,
    Sudoku,
    SudokuConfig,
    SumsConfig,
    TaskConfig,
    last_answer,
    make_task,
)
from rewards.tasks.sudoku import num_solutions, solved_grids

_DATA = Path(__file__).parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not _DATA.is_dir(), reason="needs shared/data beside the repository")


def _generations(name: str) -> list[dict[str, Any]]:
    lines = (_DATA / "llada-generations" / f"{name}_256.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _d1_answer(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


@pytest.mark.parametrize("name", ["countdown", "gsm8k", "math500", "sudoku"])
def test_last_answers_equal_d1s_regular_expression(name: str) -> None:
    for item in _generations(name):
        assert last_answer(item["generation"]) == _d1_answer(item["generation"])


def test_sudoku_rewards_equal_a_slow_reference() -> None:
    sudoku = Sudoku(SudokuConfig())
    num_right = num_empty = 0
    for item in _generations("sudoku"):
        puzzle, solution = re.findall(r"\d{16}", item["question"])[0], item["ground_truth"]
        problem = Problem(
            problem_id=puzzle, messages=(), answer=solution, reference_completion="", metadata={"puzzle": puzzle}
        )
        cells = "".join(c for c in _d1_answer(item["generation"]) or "" if c.isdigit()).ljust(16, "0")[:16]
        empty = [cell for cell in range(16) if puzzle[cell] == "0"]
        right = [cell for cell in empty if cells[cell] == solution[cell]]
        grade = sudoku.grade(problem, item["generation"])
        assert grade.reward == len(right) / len(empty)
        assert grade.correct == (cells == solution)
        num_right, num_empty = num_right + len(right), num_empty + len(empty)
    # d1's evaluation counts 137, because it also accepts answers without a tag.
    assert (num_right, num_empty) == (121, 2048)


def test_countdown_rewards_equal_d1s() -> None:
    countdown = Countdown(CountdownConfig(reward="d1"))
    num_unboxed_right = 0
    for item in _generations("countdown"):
        problem = countdown.from_ground_truth(item["question"], item["ground_truth"])
        text = item["generation"]
        # Evaluation prompts ask for \boxed, which d1's training reward rejects as illegal characters.
        assert countdown.grade(problem, text).reward == (0.0 if _d1_answer(text) is None else 0.1)
        num_unboxed_right += countdown.grade(problem, re.sub(r"\\boxed\{(.*)\}", r"\1", text)).reward == 1.0
    assert num_unboxed_right == 37  # as many as d1's eval() finds in them


def _score(config: TaskConfig) -> tuple[int, int]:
    task = make_task(config)
    grades = [
        task.grade(task.from_ground_truth(item["question"], item["ground_truth"]), item["generation"])
        for item in _generations(config.name)
    ]
    return sum(grade.score[0] for grade in grades), sum(grade.score[1] for grade in grades)


def test_the_d1_protocol_equals_d1s_parsers() -> None:
    assert _score(CountdownConfig(protocol="d1")) == (50, 256)
    assert _score(SudokuConfig(protocol="d1")) == (137, 2048)


def test_the_fixed_protocols_accuracies_are_pinned() -> None:
    assert _score(CountdownConfig()) == (49, 256)
    assert _score(SudokuConfig()) == (121, 2048)


@pytest.mark.parametrize("name", ["countdown", "gsm8k", "math500", "sudoku"])
def test_graders_never_raise_on_real_generations(name: str) -> None:
    tasks = [make_task(config) for config in (CountdownConfig(), SudokuConfig(), SumsConfig())]
    posed = [(task, task.problems(Split.TRAIN, 1, seed=0)[0]) for task in tasks]
    for item in _generations(name):
        for task, problem in posed:
            assert 0.0 <= task.grade(problem, item["generation"]).reward <= 1.0


def test_a_quarter_of_d1s_evaluation_puzzles_is_ambiguous() -> None:
    num_unique = 0
    with (_DATA / "d1-eval" / "4x4_test_sudoku.csv").open() as file:
        for row in csv.DictReader(file):
            assert row["Solution"] in solved_grids()
            assert all(given in ("0", digit) for given, digit in zip(row["Puzzle"], row["Solution"], strict=True))
            num_unique += num_solutions(row["Puzzle"]) == 1
    assert num_unique == 376  # of 500; ours all have one solution


@pytest.mark.parametrize(
    ("config", "correct", "total"),
    [
        (Gsm8kConfig(protocol="d1"), 863, 1130),
        (Gsm8kConfig(protocol="fixed"), 873, 1130),
        (Math500Config(protocol="d1", reward="d1"), 162, 500),
        (Math500Config(protocol="fixed"), 176, 500),
    ],
    ids=["gsm8k-d1", "gsm8k-fixed", "math500-d1", "math500-fixed"],
)
def test_maths_accuracies_equal_the_published_and_our_pinned_ones(config: TaskConfig, correct: int, total: int) -> None:
    task = make_task(config)
    grades = [
        task.grade(task.from_ground_truth(item["question"], item["ground_truth"]), item["generation"])
        for item in _generations(config.name)
    ]
    assert {grade.outcome for grade in grades} == {Outcome.GRADED}
    assert (sum(grade.correct for grade in grades), len(grades)) == (correct, total)


def test_every_gsm8k_demonstration_is_right() -> None:
    folder = _DATA / "gsm8k"
    task = Gsm8k(Gsm8kConfig(train_data=folder / "train.jsonl", heldout_data=folder / "test.jsonl"))
    assert (task.size(Split.TRAIN), task.size(Split.HELDOUT)) == (7473, 1319)
    problems = task.problems(Split.TRAIN, 7473, seed=0) + task.problems(Split.HELDOUT, 1319, seed=0)
    for problem in problems:
        assert task.grade(problem, problem.reference_completion).reward == 1.0
