"""Problems of one's own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rewards import Jsonl, JsonlConfig, Message, Split
from rewards.tasks.jsonl import GraderName


def _task(tmp_path: Path, *rows: dict[str, Any], grader: GraderName = "exact", **fields: Any) -> Jsonl:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Jsonl(JsonlConfig(train_data=path, heldout_data=path, grader=grader, **fields))


def test_a_conversation_and_its_answer_become_a_problem(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]
    task = _task(tmp_path, {"messages": turns, "answer": "Paris"})
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    assert problem.messages == tuple(Message(**turn) for turn in turns)
    assert problem.demonstration == "<answer>Paris</answer>"
    assert task.grade(problem, problem.demonstration).reward == 1
    assert task.grade(problem, " paris\n").correct
    assert not task.grade(problem, "Rome").correct


def test_a_last_turn_of_the_assistant_is_the_demonstration(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": r"It is \boxed{4}"}]
    (problem,) = _task(tmp_path, {"messages": turns, "answer": "4"}).problems(Split.TRAIN, 1, seed=0)
    assert [turn.role for turn in problem.messages] == ["user"]
    assert problem.demonstration == r"It is \boxed{4}"


def test_the_format_is_asked_for_where_the_recipe_says_so(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (problem,) = _task(tmp_path, {"messages": turns, "answer": "So"}, prompt="d1").problems(Split.TRAIN, 1, seed=0)
    assert problem.messages[0].content == "Be brief."
    assert problem.messages[1].content.startswith("\nRespond in the following format:\n<reasoning>")
    assert problem.messages[1].content.endswith("\n\nWhy?")
    assert problem.demonstration == "<reasoning>\n\n</reasoning>\n<answer>\nSo\n</answer>"


@pytest.mark.parametrize(
    ("grader", "answer", "right", "wrong"),
    [
        ("exact", "New York", ["<answer>new  york</answer>", "NEW\nYORK"], ["York", "New York."]),
        ("choice", "B", ["B", "(b)", "<answer>B) Paris</answer>", r"\boxed{B}", "B."], ["A", "B or C", "Because", ""]),
        ("choice", "B", [r"\boxed{\text{B}}", r"\boxed{\mathrm{(B)}}", "**B**", '"B"', "**B)** Paris"], ['"B" or "C"']),
        ("choice", "A", ["A"], ["A dog"]),
        ("number", "1,250", ["1250", "<answer>$1250.00 in all</answer>", r"\boxed{1,250}"], ["1", "1250 or 1251", ""]),
        ("math", r"\frac{1}{2}", [r"\boxed{0.5}", "<answer>2/4</answer>"], ["2", ""]),
    ],
)
def test_graders(tmp_path: Path, grader: GraderName, answer: str, right: list[str], wrong: list[str]) -> None:
    task = _task(tmp_path, {"prompt": "?", "answer": answer}, grader=grader)
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    assert [task.grade(problem, text).correct for text in right] == [True] * len(right)
    assert [task.grade(problem, text).correct for text in wrong] == [False] * len(wrong)


def test_math_takes_no_answer_that_repeats_the_question_or_is_in_another_base(tmp_path: Path) -> None:
    root = {"prompt": r"Simplify $\sqrt{180}$.", "answer": r"6\sqrt{5}"}
    base = {"prompt": "Write $555$ in base $5$.", "answer": "4210_5"}
    task = _task(tmp_path, root, base, grader="math")
    problems = {problem.answer: problem for problem in task.problems(Split.TRAIN, 2, seed=0)}
    texts = (r"<answer>6 \sqrt 5</answer>", r"<answer>\sqrt{180}</answer>")
    assert [task.grade(problems[root["answer"]], text).correct for text in texts] == [True, False]
    texts = ("<answer>4210_{5}</answer>", "<answer>4210_{6}</answer>")
    assert [task.grade(problems[base["answer"]], text).correct for text in texts] == [True, False]


def test_without_a_grader_rows_need_no_answer_and_rewards_are_zero(tmp_path: Path) -> None:
    task = _task(tmp_path, {"question": "Write a poem."}, grader="none")
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    grade = task.grade(problem, "Roses")
    assert (grade.reward, grade.correct, grade.parts) == (0, False, {"correct": 0})


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a"}, "line 1: answer is missing; it should be a text: what is right"),
        ({"answer": "a"}, "line 1: messages is missing; it should be a text: what the policy is asked"),
        ({"messages": [], "answer": "a"}, r"messages is \[\]; it should be a list that says what the policy is asked"),
        ({"messages": [{"role": "bot", "content": "x"}], "answer": "a"}, r"messages\[0\].role is \"bot\""),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "a"}, "begins with the assistant's turn"),
    ],
)
def test_a_row_that_is_no_problem_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        _task(tmp_path, row).problems(Split.TRAIN, 1, seed=0)
    assert str(refusal.value).startswith(str(tmp_path))


def test_an_answer_that_its_grader_cannot_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which the grader choice cannot match with anything"):
        _task(tmp_path, {"prompt": "a", "answer": "?!"}, grader="choice").problems(Split.TRAIN, 1, seed=0)


def test_a_config_without_data_or_with_d1s_rules_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs one of them or both"):
        JsonlConfig(grader="exact")
    with pytest.raises(ValidationError, match="has no rules for problems of your own"):
        JsonlConfig(grader="exact", train_data=Path("x"), protocol="d1")


@pytest.mark.parametrize(
    "text",
    [
        "(" * 300_000,
        " " * 300_000,
        "A" * 300_000,
        "A" + " " * 300_000,
        "((A " * 100_000,
        "\\text{" * 60_000,
        "\\text{" + "(" * 300_000,
        "A" + "*" * 300_000,
    ],
)
def test_hostile_labels_take_linear_time(tmp_path: Path, text: str) -> None:
    task = _task(tmp_path, {"prompt": "?", "answer": "B"}, grader="choice")
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    start = time.process_time()
    task.grade(problem, text)
    assert time.process_time() - start < 1.0
