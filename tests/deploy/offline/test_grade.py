"""`d1 grade` (rewards of given completions) and `d1 tasks` (the list of tasks)."""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.offline.tasks import describe_task
from rewards.tasks.registry import task_names

_QUESTION = "Numbers: [2, 3, 4]\nTarget: 5"
_GENERATIONS = [
    r"<answer>\boxed{2 \times 4 - 3}</answer>",
    "<answer>2+4-3</answer>",
    "no idea \x1b[31m",
    "2*4-3",
]


@pytest.fixture
def generations(workdir: Path) -> Path:
    path = workdir / "generations.jsonl"
    lines = [{"question": _QUESTION, "generation": text, "ground_truth": [[2, 3, 4], 5]} for text in _GENERATIONS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_json_object_says_how_many_are_correct(d1: Callable[..., Any], generations: Path) -> None:
    ended = d1("grade", "countdown", str(generations), "--json")
    found = json.loads(ended.out)
    assert (found["correct"], found["total"], found["num_lines"]) == (1, 4, 4)
    assert found["outcomes"] == {"graded": 4, "timeout": 0, "error": 0}
    assert found["parts"]["answer"] == pytest.approx(0.05)
    assert found["parts"]["correct"] == pytest.approx(0.225)
    # d1's parser reads the whole text where there is no box.
    assert json.loads(d1("grade", "countdown", str(generations), "--json", "--protocol", "d1").out)["correct"] == 2


def test_fields_of_the_task_are_overridden(d1: Callable[..., Any], generations: Path) -> None:
    ended = d1("grade", "countdown", str(generations), "prompt=compact", "operators=[+, -]", "--json")
    assert json.loads(ended.out)["correct"] == 0


def test_people_see_a_table_and_failures_that_cannot_steer_their_terminal(
    d1: Callable[..., Any], generations: Path
) -> None:
    out = d1("grade", "countdown", str(generations)).out
    assert "1 of 4: 25.0%" in out
    assert "generations.jsonl, line 2" in out
    assert "read as: 2+4-3" in out
    assert "no idea \\u001b[31m" in out
    assert "\x1b" not in out
    assert "line 2" not in d1("grade", "countdown", str(generations), "--failures", "0").out


def test_the_grade_of_each_line_can_be_kept(d1: Callable[..., Any], generations: Path, workdir: Path) -> None:
    d1("grade", "countdown", str(generations), "--out", str(workdir / "grades.jsonl"), "--json")
    items = [json.loads(line) for line in (workdir / "grades.jsonl").read_text().splitlines()]
    assert [item["correct"] for item in items] == [1, 0, 0, 0]
    assert items[1]["answer"] == "2+4-3"
    assert items[1]["place"].endswith("line 2")


def test_a_sudoku_counts_its_empty_cells(d1: Callable[..., Any], workdir: Path) -> None:
    line = {
        "question": "Solve the following Sudoku puzzle: 0234341221434300\n",
        "generation": "<answer>1234341221434312</answer>",
        "ground_truth": "1234341221434321",
    }
    (workdir / "x.jsonl").write_text(json.dumps(line))
    found = json.loads(d1("grade", "sudoku", str(workdir / "x.jsonl"), "--json").out)
    assert (found["correct"], found["total"], found["num_solved"]) == (1, 3, 0)


@pytest.mark.parametrize(
    ("arguments", "content", "sentence"),
    [
        (["chess"], "{}", "there is no task chess; the tasks are countdown, gsm8k, humaneval, "),
        (["countdown", "colour=3"], "{}", "colour is no key of this task, which has "),
        (["countdown", "num_numbers=1"], "{}", "num_numbers is 1; it should be at least 2"),
        (["sums", "--protocol", "d1"], "{}", "protocol is no key of this task"),
        (["countdown"], "", "x.jsonl has no rows"),
        (["countdown"], '{"question": "a"}', "line 1 has no column generation; its columns are question"),
        (["countdown"], '{"question": "a", "generation": 3, "ground_truth": 1}', "line 1: generation is no text"),
        (
            ["countdown"],
            '{"question": "a", "generation": "", "ground_truth": 7}',
            "line 1: the ground truth is 7; a countdown line has [[numbers], target]",
        ),
        (
            ["sudoku"],
            '{"question": "a", "generation": "", "ground_truth": "7"}',
            'line 1: the question "a" has no puzzle',
        ),
    ],
)
def test_what_cannot_be_graded_is_refused_in_one_sentence(
    d1: Callable[..., Any], workdir: Path, arguments: list[str], content: str, sentence: str
) -> None:
    (workdir / "x.jsonl").write_text(content)
    ended = d1("grade", arguments[0], str(workdir / "x.jsonl"), *arguments[1:])
    ended.assert_refused(sentence)
    assert ended.out == ""


def test_a_file_of_a_spreadsheet_is_graded(d1: Callable[..., Any], workdir: Path) -> None:
    rows = "question;generation;ground_truth\r\n3 + 4?;<answer>7</answer>;7\r\n1 + 1?;<answer>3</answer>;2\r\n"
    (workdir / "x.csv").write_bytes(BOM_UTF8 + rows.encode())
    (workdir / "y.csv").write_bytes(rows.encode("utf-16"))
    for name in ("x.csv", "y.csv"):
        found = json.loads(d1("grade", "jsonl", name, "grader=number", "--json").out)
        assert (found["correct"], found["total"]) == (1, 2)


@pytest.mark.parametrize(
    ("task", "question", "generation", "truth"),
    [
        ("gsm8k", "3 + 4?", "<answer>7</answer>", "7"),
        ("math500", "3 + 4?", "<answer>7</answer>", "7"),
        ("math500", "Which?", "<answer>[1, 2]</answer>", "[1, 2]"),
        ("countdown", _QUESTION, "<answer>2*4-3</answer>", "[[2, 3, 4], 5]"),
        ("sudoku", "0234341221434321", "<answer>1234341221434321</answer>", "1234341221434321"),
    ],
)
def test_csv_has_ground_truths_as_text(
    d1: Callable[..., Any], workdir: Path, task: str, question: str, generation: str, truth: str
) -> None:
    with (workdir / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "generation", "ground_truth"), (question, generation, truth)])
    assert json.loads(d1("grade", task, "x.csv", "--json").out)["num_solved"] == 1


def test_a_number_is_a_text_where_a_task_wants_one(d1: Callable[..., Any], workdir: Path) -> None:
    line = {"question": "3 + 4?", "generation": "<answer>7</answer>", "ground_truth": 7}
    (workdir / "x.jsonl").write_text(json.dumps(line))
    assert json.loads(d1("grade", "math500", "x.jsonl", "--json").out)["correct"] == 1


def test_the_columns_of_other_data_are_named(d1: Callable[..., Any], workdir: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}]
    line = {"prompt": turns, "reward_model": {"ground_truth": 7}, "generation": r"\boxed{7}"}
    (workdir / "x.jsonl").write_text(json.dumps(line))
    words = "grade", "jsonl", "x.jsonl", "grader=number", "columns.prompt=prompt"
    ended = d1(*words, "columns.answer=reward_model.ground_truth", "--json")
    assert json.loads(ended.out)["correct"] == 1
    d1(*words, "columns.answer=reward_model.truth").assert_refused(
        "x.jsonl, line 1: reward_model has no truth; it has ground_truth"
    )
    d1(*words, "columns.answr=x").assert_refused("columns.answr is no key of a recipe; did you mean columns.answer?")


@pytest.mark.parametrize(
    ("truth", "sentence"),
    [
        ({"target": ["7"]}, "ground_truth is an object; columns.answer=ground_truth.target would take a part of it"),
        (["7"], "ground_truth is a list of 1, and there can be one right answer; columns.answer=ground_truth.0 would"),
        (True, "ground_truth is true; it should be a text or a number: what is right"),
        ("unknown", 'answer is "unknown", which the grader number cannot match with anything'),
    ],
)
def test_a_ground_truth_that_is_no_answer_is_refused_with_the_way_to_one(
    d1: Callable[..., Any], workdir: Path, truth: object, sentence: str
) -> None:
    line = {"question": "3 + 4?", "generation": "7", "ground_truth": truth}
    (workdir / "x.jsonl").write_text(json.dumps(line))
    d1("grade", "jsonl", "x.jsonl", "grader=number").assert_refused(f"d1: x.jsonl, line 1: {sentence}")


def test_a_task_reports_skipped_and_invalid_data(d1: Callable[..., Any], workdir: Path) -> None:
    (workdir / "x.jsonl").write_text('{"prompt": "a", "answer": 1}\n' * 3 + '{"prompt": "b", "label": 2}\n')
    words = "tasks", "jsonl", "grader=number", "train_data=x.jsonl"
    d1(*words).assert_refused("x.jsonl, line 4: answer is missing; ", "; columns.answer=label would take label")
    (workdir / "x.jsonl").write_text('{"prompt": "a", "answer": 1}\n' * 3)
    (remark,) = json.loads(d1(*words, "--json").out)["remarks"]
    assert remark == "x.jsonl: 2 of 3 rows repeat an earlier problem and are left out, first line 2 (as line 1)"
    assert remark in d1(*words).out


def test_tasks_are_listed_with_sizes_and_an_example(d1: Callable[..., Any]) -> None:
    found = {task["name"]: task for task in json.loads(d1("tasks", "--json").out)}
    assert tuple(found) == task_names()
    # Known without access to the hub.
    assert found["gsm8k"]["sizes"] == {"train": "7,473", "heldout": "1,319"}
    assert found["humaneval"]["sizes"] == {"train": "cut from the hub's", "heldout": "cut from the hub's"}
    assert found["sums"]["sizes"] == {"train": "825", "heldout": "175"}
    assert all(task["prompt"] and task["demonstration"] for task in found.values())
    out = d1("tasks").out
    assert all(name in out for name in task_names())


def test_one_task_is_shown_with_its_prompt(d1: Callable[..., Any]) -> None:
    out = d1("tasks", "countdown", "prompt=compact").out
    example = describe_task("countdown", ["prompt=compact"])
    assert example["prompt"] in out
    assert example["demonstration"] in out
