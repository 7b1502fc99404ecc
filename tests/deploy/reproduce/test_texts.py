"""Unlabelled text has the form of an answer and nobody's knowledge of the right one."""

from __future__ import annotations

import re

import pytest

from deploy.reproduce.texts import unlabelled
from rewards import CountdownConfig, Split, SudokuConfig, SumsConfig, make_task


def test_a_sudokus_givens_are_copied_and_its_empty_cells_are_random() -> None:
    config = SudokuConfig(prompt="compact")
    texts = unlabelled(config, 200, 200, 3)
    for prompt, text in texts:
        grid = re.fullmatch(r"<answer>([1-4]{16})</answer>", text)
        assert grid is not None
        assert all(given in ("0", cell) for given, cell in zip(prompt, grid[1], strict=True))
    task, problems = make_task(config), make_task(config).problems(Split.TRAIN, 200, 3)
    assert [prompt for prompt, _ in texts] == [problem.messages[-1].content for problem in problems]
    grades = [task.grade(problem, text).reward for problem, (_, text) in zip(problems, texts, strict=True)]
    assert 0.15 < sum(grades) / 200 < 0.35, "a quarter of the cells, by chance"


def test_countdowns_numbers_are_joined_whatever_that_comes_to() -> None:
    config = CountdownConfig(prompt="compact", max_number=9)
    task, texts = make_task(config), unlabelled(config, 200, 200, 3)
    problems = task.problems(Split.TRAIN, 200, 3)
    for problem, (_, text) in zip(problems, texts, strict=True):
        assert sorted(re.findall(r"\d+", text)) == sorted(problem.metadata["numbers"].split())
    num_right = sum(task.grade(problem, text).correct for problem, (_, text) in zip(problems, texts, strict=True))
    assert num_right < 30


def test_more_texts_than_problems_are_other_answers_to_the_same_prompts() -> None:
    config = CountdownConfig(prompt="compact", max_number=9, max_target=99, heldout_fraction=0.3)
    texts = unlabelled(config, 40, 4000, 0)
    prompts = [prompt for prompt, _ in texts]
    assert prompts == prompts[:40] * 100
    assert prompts[:40] == [prompt for prompt, _ in unlabelled(config, 40, 40, 0)]
    assert len({text for prompt, text in texts if prompt == prompts[0]}) > 5


def test_it_is_the_same_again_and_another_with_another_seed() -> None:
    config = SudokuConfig(prompt="compact")
    assert unlabelled(config, 5, 5, 0) == unlabelled(config, 5, 5, 0)
    assert unlabelled(config, 5, 5, 0) != unlabelled(config, 5, 5, 1)


def test_other_tasks_have_none() -> None:
    with pytest.raises(ValueError, match="there is no unlabelled text for task sums"):
        unlabelled(SumsConfig(), 5, 5, 0)
