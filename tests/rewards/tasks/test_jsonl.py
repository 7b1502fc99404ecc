"""Tests of the jsonl task: problems from user files."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from rewards import Jsonl, JsonlConfig, Message, Split
from rewards.data.columns import Columns, answer_text
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
    assert problem.reference_completion == "<answer>Paris</answer>"
    assert task.grade(problem, problem.reference_completion).reward == 1
    assert task.grade(problem, " paris\n").correct
    assert not task.grade(problem, "Rome").correct


def test_a_final_assistant_turn_is_the_demonstration(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": r"It is \boxed{4}"}]
    (problem,) = _task(tmp_path, {"messages": turns, "answer": "4"}).problems(Split.TRAIN, 1, seed=0)
    assert [turn.role for turn in problem.messages] == ["user"]
    assert problem.reference_completion == r"It is \boxed{4}"


def test_the_prompt_asks_for_the_format_if_configured(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (problem,) = _task(tmp_path, {"messages": turns, "answer": "So"}, prompt="d1").problems(Split.TRAIN, 1, seed=0)
    assert problem.messages[0].content == "Be brief."
    assert problem.messages[1].content.startswith("\nRespond in the following format:\n<reasoning>")
    assert problem.messages[1].content.endswith("\n\nWhy?")
    assert problem.reference_completion == "<reasoning>\n\n</reasoning>\n<answer>\nSo\n</answer>"


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
def test_each_grader_grades_its_answers(
    tmp_path: Path, grader: GraderName, answer: str, right: list[str], wrong: list[str]
) -> None:
    task = _task(tmp_path, {"prompt": "?", "answer": answer}, grader=grader)
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    assert [task.grade(problem, text).correct for text in right] == [True] * len(right)
    assert [task.grade(problem, text).correct for text in wrong] == [False] * len(wrong)


def test_math_refuses_repeated_questions_and_other_bases(tmp_path: Path) -> None:
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
    assert task.example().answer == ""


def test_a_solutions_number_is_parsed_like_a_completions(tmp_path: Path) -> None:
    task = _task(tmp_path, {"prompt": "?", "answer": r"It is $-\boxed{3}$."}, grader="number")
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    texts = ("-3", r"$-\boxed{3}$", "3")
    assert [task.grade(problem, text).correct for text in texts] == [True, True, False]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "a"},
            "line 1: answer is missing; it should be a text or a number: what is right; the columns are prompt: name",
        ),
        ({"prompt": "a", "answer": None}, "line 1: answer is missing; it should be a text or a number: what is right$"),
        ({"prompt": "a", "answer": float("nan")}, "line 1: answer is missing"),
        ({"prompt": "a", "answer": float("inf")}, "line 1: answer is Infinity; it should be a text or a number"),
        ({"prompt": "a", "answer": True}, "line 1: answer is true; it should be a text or a number"),
        ({"prompt": "a", "answer": ""}, "line 1: answer is empty; it should be what is right"),
        (
            {"prompt": "a", "answer": ["7", "8"]},
            "answer is a list of 2, .*; task.columns.answer=answer.0 would take the",
        ),
        ({"prompt": "a", "answer": {"target": ["7"]}}, "answer is an object; task.columns.answer=answer.target would"),
        ({"answer": "a"}, "line 1: messages, prompt and question are missing; one should be what the policy is asked"),
        ({"Problem": "a", "answer": "a"}, "are missing; .*; task.columns.prompt=Problem would take Problem"),
        (
            {"prompt": "a", "extra": {"answer": "#### 7"}, "reward_model": {"ground_truth": "7"}},
            "task.columns.answer=reward_model.ground_truth would take reward_model.ground_truth",
        ),
        ({"prompt": 5, "answer": "7"}, "line 1: prompt is 5; it should be a text or a list of turns"),
        ({"messages": [], "answer": "a"}, r"messages is \[\]; it should be a list that says what the policy is asked"),
        ({"messages": [{"role": "bot", "content": "x"}], "answer": "a"}, r"messages\[0\].role is \"bot\""),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "a"}, "begins with the assistant's turn"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        _task(tmp_path, row).problems(Split.TRAIN, 1, seed=0)
    assert str(refusal.value).startswith(str(tmp_path))


# The format in which verl's scripts (and its fork DARE) write GSM8K.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"content": "What is 3 + 4?", "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "extra_info": {"answer": "3 + 4 = 7 #### 7", "index": 0, "question": "3 + 4?", "split": "train"},
}
OF_VERL = Columns(prompt="prompt", answer="reward_model.ground_truth")


def test_verls_rows_are_accepted(tmp_path: Path) -> None:
    # Struct columns contain the fields of all rows.
    other = {**VERL, "prompt": [{"role": "user", "content": "1 + 1?"}], "extra_info": {"other": "x"}}
    parquet.write_table(pa.Table.from_pylist([VERL, other]), tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_text(json.dumps(VERL))
    (tmp_path / "train.csv").write_text(
        'prompt,reward_model\n"[{""role"": ""user"", ""content"": ""What is 3 + 4?""}]","{""ground_truth"": ""7""}"\n'
    )
    for name, count in (("train.parquet", 2), ("train.jsonl", 1), ("train.csv", 1)):
        path = tmp_path / name
        task = Jsonl(JsonlConfig(train_data=path, heldout_data=path, grader="math", columns=OF_VERL))
        problems = {problem.messages: problem.answer for problem in task.problems(Split.TRAIN, count, seed=0)}
        assert problems[(Message(role="user", content="What is 3 + 4?"),)] == "7"


def test_configured_columns_take_precedence(tmp_path: Path) -> None:
    row = {
        "problem": "3 + 4?",
        "solution": r"It is \boxed{7}.",
        "messages": [{"role": "user", "content": "other"}],
        "answer": "other",
    }
    task = _task(tmp_path, row, grader="number", columns=Columns(prompt="problem", answer="solution"))
    (problem,) = task.problems(Split.TRAIN, 1, seed=0)
    assert (problem.messages[-1].content, problem.answer) == ("3 + 4?", "7")
    assert task.example().answer == task.from_ground_truth("3 + 4?", 7).answer == "7"


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (Columns(answer="reward_model.truth"), "line 1: reward_model has no truth; it has ground_truth, style"),
        (Columns(answer="reward.ground_truth"), "line 1: there is no column reward.ground_truth; the columns are abil"),
        (
            Columns(answer="reward_model"),
            "reward_model is an object; task.columns.answer=reward_model.ground_truth wou",
        ),
        (
            Columns(prompt="reward_model", answer="ability"),
            "reward_model is {.*; it should be a text or a list of turns",
        ),
    ],
)
def test_an_unknown_path_is_named_with_the_available_ones(tmp_path: Path, columns: Columns, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _task(tmp_path, VERL, columns=columns).problems(Split.TRAIN, 1, seed=0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (-7, "-7"),
        (-0.0, "0"),
        (7.0, "7"),
        (0.5, "0.5"),
        (1e20, "100000000000000000000"),
        (1e-7, "0.0000001"),
        (Decimal("7.50"), "7.5"),
        (Decimal("700"), "700"),
        (" 7 ", " 7 "),
    ],
)
def test_a_json_number_is_a_valid_answer(value: object, text: str) -> None:
    assert answer_text(value, "answer") == text


@pytest.mark.parametrize("grader", ["exact", "number", "math"])
def test_an_answer_may_be_a_number_or_boxed(tmp_path: Path, grader: GraderName) -> None:
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": 7.0}, {"prompt": "c", "answer": r"so \boxed{7}"}]
    task = _task(tmp_path, *rows, grader=grader)
    for problem in task.problems(Split.TRAIN, 3, seed=0):
        assert problem.answer == "7"
        assert task.grade(problem, r"\boxed{7}").correct


def test_a_list_of_strings_is_no_answer(tmp_path: Path) -> None:
    """Skywork's ground truths are JSON lists. Parsed as expressions, they would never match an answer."""
    row = {"prompt": "a", "answer": '["7"]'}
    with pytest.raises(ValueError, match="answer is a list of 1, and there can be one right answer"):
        _task(tmp_path, row, grader="math").problems(Split.TRAIN, 1, seed=0)
    task = _task(tmp_path, row, grader="math", columns=Columns(answer="answer.0"))
    assert task.problems(Split.TRAIN, 1, seed=0)[0].answer == "7"
    task = _task(tmp_path, {"prompt": "a", "answer": "[1, 2]"}, grader="math")
    assert task.problems(Split.TRAIN, 1, seed=0)[0].answer == "[1, 2]"


def test_17_000_rows_as_dapos_are_read_in_linear_time(tmp_path: Path) -> None:
    prompt = "Solve the following math problem step by step. " * 12
    row = '{{"prompt": [{{"role": "user", "content": "{} {}"}}], "reward_model": {{"ground_truth": "{}"}}}}\n'
    path = tmp_path / "dapo.jsonl"
    path.write_text("".join(row.format(prompt, number, number) for number in range(17_000)))
    task = Jsonl(JsonlConfig(train_data=path, heldout_data=path, grader="math", columns=OF_VERL))
    start = time.process_time()
    assert task.size(Split.TRAIN) == 17_000
    # Two seconds on a fast core, seven on a slow one. A look at all rows for each row takes minutes.
    assert time.process_time() - start < 30


def test_an_unmatchable_answer_is_refused(tmp_path: Path) -> None:
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
