"""Tests of the contract that every task must satisfy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from rewards import CountdownConfig, Outcome, Problem, Split, SudokuConfig, SumsConfig, Task, TaskConfig, make_task

_CONFIGS: list[TaskConfig] = [
    CountdownConfig(validation_fraction=0.2),
    CountdownConfig(num_numbers=4, max_number=20, prompt="compact", validation_fraction=0.2),
    SudokuConfig(validation_fraction=0.2),
    SudokuConfig(prompt="compact", validation_fraction=0.2),
    SumsConfig(validation_fraction=0.2),
    SumsConfig(num_terms=4, modulus=7, validation_fraction=0.2),
]
_TASKS = [pytest.param(make_task(config), id=f"{config.name}-{i}") for i, config in enumerate(_CONFIGS)]
_POSED = [(task, task.problems(Split.TRAIN, 1, seed=0)[0]) for task in map(make_task, _CONFIGS)]

_HOSTILE_ANSWERS = {
    "power tower": "9**9**9",
    "power tower in parentheses": "(9**9)**9**9",
    "long product": "9*" * 500_000 + "9",
    "one megabyte of digits": "9" * 1_000_000,
    "deep parentheses": "(" * 2_000 + "1" + ")" * 2_000,
    "open parentheses": "(" * 1_000_000,
    "division by zero": "1/0",
    "division by a zero term": "1/(3-3)+7",
    "unicode digits": "\u0661\u0662\u0663 \uff11 \u00b2 \u2460",
    "lone surrogate": "\ud800",
    "nul": "\x00" * 1_000,
    "code": "__import__('os').system('exit 1')",
    "spaces": " " * 1_000_000,
    "tags": "<answer>" * 100_000,
}


@pytest.mark.parametrize("task", _TASKS)
@pytest.mark.parametrize("split", Split)
def test_problems_are_determined_by_split_count_and_seed(task: Task, split: Split) -> None:
    first, again, other = (task.problems(split, 50, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert len({problem.problem_id for problem in first}) == 50


@pytest.mark.parametrize("task", _TASKS)
def test_fewer_problems_are_a_prefix_of_more(task: Task) -> None:
    assert task.problems(Split.TRAIN, 120, seed=5)[:30] == task.problems(Split.TRAIN, 30, seed=5)
    assert task.problems(Split.TRAIN, 0, seed=5) == []


@pytest.mark.parametrize("task", _TASKS)
def test_splits_are_disjoint_across_seeds(task: Task) -> None:
    train = {p.problem_id for seed in range(3) for p in task.problems(Split.TRAIN, 100, seed)}
    heldout = {p.problem_id for seed in range(3, 6) for p in task.problems(Split.HELDOUT, 100, seed)}
    assert train.isdisjoint(heldout)


@pytest.mark.parametrize("task", _TASKS)
@pytest.mark.parametrize("split", Split)
def test_demonstrations_get_full_reward(task: Task, split: Split) -> None:
    for problem in task.problems(split, 100, seed=2):
        grade = task.grade(problem, problem.reference_completion)
        assert (grade.reward, grade.correct, grade.outcome) == (1.0, True, Outcome.GRADED)


@pytest.mark.parametrize("task", _TASKS)
def test_another_problems_demonstration_does_not_solve_this_one(task: Task) -> None:
    problems = task.problems(Split.TRAIN, 40, seed=2)
    for problem, other in pairwise(problems):
        if problem.answer != other.answer:
            assert not task.grade(problem, other.reference_completion).correct


@pytest.mark.parametrize("hostile", _HOSTILE_ANSWERS.values(), ids=list(_HOSTILE_ANSWERS))
@pytest.mark.parametrize("wrapping", ["{}", "<answer>{}</answer>", "<answer>{}"])
def test_hostile_texts_are_graded_in_bounded_time(hostile: str, wrapping: str) -> None:
    text = wrapping.replace("{}", hostile)
    for task, problem in _POSED:
        start = time.process_time()
        grade = task.grade(problem, text)
        assert time.process_time() - start < 1.0
        assert not grade.correct
        assert 0.0 <= grade.reward < 1.0


@given(
    st.one_of(
        st.text(),
        st.text().map("<answer>{}</answer>".format),
        st.text(alphabet="0123456789+-*/(). ").map("<answer>{}</answer>".format),
    )
)
@settings(max_examples=200)
def test_graders_never_raise(text: str) -> None:
    for task, problem in _POSED:
        grade = task.grade(problem, text)
        assert sum(grade.parts.values()) == grade.reward
        assert grade.parts.keys() == task.grade(problem, "").parts.keys()


def test_problems_are_the_same_in_every_process() -> None:
    config = CountdownConfig()
    script = (
        "import json, sys; from dataclasses import asdict; from rewards import *;"
        "print(json.dumps([asdict(p) for p in make_task(CountdownConfig()).problems(Split.TRAIN, 5, 0)]))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    ours = [asdict(problem) for problem in make_task(config).problems(Split.TRAIN, 5, 0)]
    assert json.loads(output) == json.loads(json.dumps(ours))


def test_the_name_selects_the_task() -> None:
    adapter: TypeAdapter[TaskConfig] = TypeAdapter(TaskConfig)
    for config in _CONFIGS:
        parsed = adapter.validate_json(config.model_dump_json())
        assert parsed == config
        assert make_task(parsed).name == config.name
    with pytest.raises(ValidationError, match="countdown"):
        adapter.validate_python({"name": "chess"})


@pytest.mark.parametrize("config", [CountdownConfig, SudokuConfig, SumsConfig])
def test_configs_are_frozen_and_document_each_field(config: type[BaseModel]) -> None:
    for name, schema in config.model_json_schema()["properties"].items():
        assert schema.get("description"), name
    with pytest.raises(ValidationError, match="frozen"):
        config().name = "other"  # type: ignore[attr-defined]


def test_problems_are_frozen() -> None:
    problem: Problem = _POSED[0][1]
    with pytest.raises(AttributeError):
        problem.answer = "1"  # type: ignore[misc]
