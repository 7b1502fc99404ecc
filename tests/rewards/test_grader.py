"""Tests of the grader: combination of reward parts and terms, and failing tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards import (
    Countdown,
    CountdownConfig,
    Grade,
    Grader,
    Outcome,
    Problem,
    RewardConfig,
    Sample,
    Split,
    Sums,
    SumsConfig,
)
from rewards.grader import task_grade
from tests.rewards.conftest import make_sample

SOME_RIGHT = "<answer>308</answer>"
RIGHT = "<answer>309</answer>"


def _reward(**fields: object) -> RewardConfig:
    return RewardConfig.model_validate(fields)


def _function(directory: Path, source: str) -> dict[str, object]:
    """Configure a function term with a new module, because Python imports a name only once."""
    name = f"reward_{abs(hash(source))}"
    (directory / f"{name}.py").write_text(source)
    return {"kind": "function", "path": f"{name}:value", "directory": directory}


def test_without_terms_a_grade_equals_the_tasks() -> None:
    samples = [make_sample(text) for text in (RIGHT, SOME_RIGHT, "", "<answer>3")]
    assert Grader(SumsConfig(), RewardConfig()).grade(samples) == [
        Sums(SumsConfig()).grade(sample.problem, sample.text) for sample in samples
    ]


def test_terms_add_parts_to_the_tasks() -> None:
    terms = {"overlong": {"kind": "length_penalty", "weight": 0.5, "buffer_tokens": 4}, "fast": {"kind": "speed"}}
    grader = Grader(SumsConfig(), _reward(task_weight=3, terms=terms))
    wrong, right = grader.grade([make_sample(SOME_RIGHT), make_sample(RIGHT, num_tokens=3)])
    assert wrong.parts == {"digits": 3 * (2 / 3), "overlong": -0.25, "fast": 2.0}
    assert right.parts == {"digits": 3.0, "overlong": 0.0, "fast": 1.0}
    assert (wrong.correct, right.correct) == (False, True)
    assert wrong.counts


@given(
    st.floats(0, 1e6),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_a_reward_is_exactly_the_sum_of_its_parts(task_weight: float, weights: Sequence[float], tokens: int) -> None:
    terms = {f"t{index}": {"kind": "speed", "weight": weight} for index, weight in enumerate(weights)}
    grader = Grader(SumsConfig(), _reward(task_weight=task_weight, terms=terms))
    for grade in grader.grade([make_sample(text, num_tokens=tokens) for text in (RIGHT, SOME_RIGHT, "")]):
        assert grade.reward == sum(grade.parts.values())
        assert list(grade.parts) == ["digits", *terms]


@given(st.floats(0, 1e6))
def test_a_reward_of_two_task_parts_is_exactly_their_sum(task_weight: float) -> None:
    """In floating point, a weight times a sum can differ from the sum of weighted parts."""
    task = CountdownConfig()
    (problem,) = Countdown(task).problems(Split.TRAIN, 1, seed=0)
    sample = replace(make_sample(problem.reference_completion), problem=problem)
    (grade,) = Grader(task, _reward(task_weight=task_weight)).grade([sample])
    assert len(grade.parts) == 2
    assert grade.reward == sum(grade.parts.values())


def test_evaluation_uses_no_terms(tmp_path: Path) -> None:
    term = _function(tmp_path, "def value(**facts):\n    raise SystemExit('asked')")
    grader = Grader(SumsConfig(), _reward(terms={"own": term}, task_weight=0))
    (grade,) = grader.evaluate([make_sample(RIGHT)])
    assert (grade.reward, grade.correct) == (1.0, True)


@pytest.mark.parametrize(("ungraded", "counts"), [("mask", False), ("zero", True)])
def test_a_term_without_a_value_makes_the_grade_an_error(ungraded: str, counts: bool, tmp_path: Path) -> None:
    term = _function(tmp_path, "def value(completion, **rest):\n    return None if completion else 2.0")
    grader = Grader(SumsConfig(), _reward(ungraded=ungraded, terms={"own": term, "fast": {"kind": "speed"}}))
    failed, graded = grader.grade([make_sample(RIGHT), make_sample("")])
    assert (failed.outcome, failed.reward, failed.parts) == (Outcome.ERROR, 0.0, {})
    assert failed.detail == f"own: {term['path']} gave no value"
    # The task's own verdict is kept.
    assert (failed.correct, failed.answer) == (True, graded.answer and failed.answer)
    assert (failed.counts, graded.counts) == (counts, True)
    assert graded.parts == {"digits": 0.0, "own": 2.0, "fast": 2.0}


class _Broken(Sums):
    """Faulty task that raises on some texts."""

    def grade(self, problem: Problem, text: str) -> Grade:
        if text == "slow":
            return Grade(reward=0.5, parts={"digits": 0.5}, correct=False, outcome=Outcome.TIMEOUT)
        raise ZeroDivisionError("by zero")


def test_a_grader_that_raises_is_a_counted_error() -> None:
    grade = task_grade(_Broken(SumsConfig()), make_sample("x"))
    assert (grade.outcome, grade.counts) == (Outcome.ERROR, False)
    assert grade.detail == "the grader failed on sums/3,7,9: ZeroDivisionError: by zero"


def test_terms_are_not_called_for_ungraded_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rewards.grader.make_task", _Broken)
    term = _function(tmp_path, "asked = []\ndef value(completion, **rest):\n    raise SystemExit(completion)")
    timeout, error = Grader(SumsConfig(), _reward(terms={"own": term})).grade([make_sample("slow"), make_sample("x")])
    assert (timeout.outcome, error.outcome) == (Outcome.TIMEOUT, Outcome.ERROR)
    assert timeout.reward == 0.0
    assert not timeout.parts


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"terms": {"a": {"kind": "speed", "weight": math.inf}}}, "finite"),
        ({"terms": {"a/b": {"kind": "speed"}}}, "pattern"),
        ({"terms": {"a": {"kind": "charm"}}}, "expected tags"),
        ({"task_weight": -1}, "greater than or equal to 0"),
        ({"terms": {"a": {"kind": "length_penalty"}}}, "buffer_tokens"),
    ],
)
def test_meaningless_rewards_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        _reward(**fields)


def test_a_term_named_like_a_part_of_the_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^terms\.digits: the task's reward has a part of that name; take another$"):
        _reward(terms={"digits": {"kind": "speed"}}).check(["digits"])


def test_a_terms_error_names_it(sample: Callable[..., Sample]) -> None:
    reward = _reward(terms={"own": {"kind": "function", "path": "no_such_module:value"}})
    with pytest.raises(ValueError, match=r"^terms\.own: no_such_module:value cannot be imported, installed or from /"):
        reward.check([])
    assert reward.resolved().terms["own"].directory == Path.cwd()
