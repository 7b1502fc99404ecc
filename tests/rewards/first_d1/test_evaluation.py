"""Tests of the first d1's prompts and evaluation problems (dllm-reasoning/d1 837888f, `eval/`)."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from rewards import Countdown, CountdownConfig, Gsm8k, Gsm8kConfig, Math500, Math500Config, Split, Sudoku, SudokuConfig
from rewards.data.dataset import file_order
from rewards.first_d1.evaluation import TASKS, d1_prompt, evaluated_problems

# sha256 of the first d1's `CTD_SYSTEM_PROMPT`, `GSM_SYSTEM_PROMPT`, `MATH500_SYSTEM_PROMPT`, `SUDOKU_SYSTEM_PROMPT`.
PROMPTS = {
    "countdown": "a303f737bca286cb",
    "gsm8k": "f11d75a706090b95",
    "math500": "3e82f3bac66b3bc1",
    "sudoku": "758dc4e1b10cba4d",
}
EXAMPLES = {
    "countdown": Countdown(CountdownConfig(prompt="compact")),
    "gsm8k": Gsm8k(Gsm8kConfig(prompt="compact")),
    "math500": Math500(Math500Config(prompt="compact")),
    "sudoku": Sudoku(SudokuConfig(prompt="compact")),
}


@pytest.mark.parametrize("task", TASKS)
def test_prompts_equal_the_first_d1s(task: str) -> None:
    problem = EXAMPLES[task].example()
    numbers = ", ".join(problem.metadata.get("numbers", "").split())
    words = {
        "countdown": f"Numbers: [{numbers}]\nTarget: {problem.answer}",
        "gsm8k": problem.messages[0].content,
        "math500": problem.messages[0].content,
        "sudoku": f"Solve the following Sudoku puzzle: {problem.metadata.get('puzzle')}\n",
    }
    turn = d1_prompt(task, problem)
    assert turn.endswith(f"\n\n{words[task]}")
    system = turn.removesuffix(f"\n\n{words[task]}")
    assert sha256(system.encode()).hexdigest()[:16] == PROMPTS[task]


def test_the_first_256_puzzles_are_evaluated_as_published(shared: Path) -> None:
    config = SudokuConfig(prompt="compact", heldout_data=shared / "data" / "d1-eval" / "4x4_test_sudoku.csv")
    task = Sudoku(config)
    found = task.problems(Split.HELDOUT, task.max_size(Split.HELDOUT), seed=0)
    in_order = file_order(found, task="sudoku", split=Split.HELDOUT, seed=0)
    lines = (shared / "data" / "d1-eval" / "4x4_test_sudoku.csv").read_text().splitlines()
    assert [problem.metadata["puzzle"] for problem in in_order] == [line[:16] for line in lines[1:]]
    puzzles = [problem.metadata["puzzle"] for problem in evaluated_problems("sudoku", in_order)]
    # Number and first two problems as in its published generations: `np.random.choice` after seed 42.
    assert len(puzzles) == len(set(puzzles)) == 256
    assert puzzles[:2] == ["4320004330100004", "0002403020033024"]


def test_smaller_files_and_other_tasks_are_evaluated_completely() -> None:
    problems = EXAMPLES["sudoku"].problems(Split.HELDOUT, 10, seed=0)
    assert evaluated_problems("sudoku", problems) == problems
    assert evaluated_problems("gsm8k", problems * 30) == problems * 30
