"""Tests of the MATH task: data, both reward rules, both evaluation protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from rewards import Math500, Math500Config, Outcome, Problem, Split, TaskConfig
from rewards.maths import AnswerVerdict, MathVerifier

_ROWS = [
    {"problem": "Compute $\\frac{1}{4} + \\frac{1}{4}$.", "solution": "They add up to $\\boxed{\\frac{1}{2}}.$"},
    {"problem": "What is $3 + 4$?", "solution": "It is $\\boxed 7$ at last."},
    {"problem": "Simplify $\\sqrt{180}$.", "solution": "See the figure.", "answer": "6\\sqrt{5}"},
    {"problem": "Write $555$ in base $5$.", "solution": "So $\\boxed{4210_5}$."},
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier()
    yield verifier
    verifier.close()


@pytest.fixture(autouse=True)
def _one_verifier(verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one verifier, because each one would import sympy again."""
    monkeypatch.setattr("rewards.tasks.math500.MathVerifier", lambda: verifier)


def _write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _problems(tmp_path: Path, **fields: object) -> tuple[Math500, dict[str, Problem]]:
    path = _write(tmp_path / "rows.jsonl", _ROWS)
    task = Math500(Math500Config.model_validate({"train_data": path, "heldout_data": path, **fields}))
    return task, {problem.answer: problem for problem in task.problems(Split.TRAIN, len(_ROWS), seed=0)}


def test_a_rows_prompt_equals_d1s(tmp_path: Path) -> None:
    task, problems = _problems(tmp_path)
    assert task.size(Split.HELDOUT) == len(_ROWS)
    assert problems.keys() == {"\\frac{1}{2}", "7", "6\\sqrt{5}", "4210_5"}
    (message,) = problems["7"].messages
    assert message.content == (
        "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
        "\n\nYou are a math expert. You will be given a question to solve. Solve it step by step. "
        "Wrap the final answer in a \\boxed{}. \n\nWhat is $3 + 4$?"
    )
    assert problems["7"].reference_completion == (
        "<reasoning>\nIt is $\\boxed 7$ at last.\n</reasoning>\n<answer>\n\\boxed{7}\n</answer>"
    )


def test_the_compact_style_is_the_problem_and_the_answer(tmp_path: Path) -> None:
    _, problems = _problems(tmp_path, prompt="compact")
    assert problems["7"].messages[0].content == "What is $3 + 4$?"
    assert problems["7"].reference_completion == "<answer>\\boxed{7}</answer>"


@pytest.mark.parametrize("prompt", ["d1", "compact"])
def test_demonstrations_get_full_reward(tmp_path: Path, prompt: str) -> None:
    task, problems = _problems(tmp_path, prompt=prompt)
    for problem in problems.values():
        grade = task.grade(problem, problem.reference_completion)
        assert (grade.reward, grade.correct, grade.outcome) == (1.0, True, Outcome.GRADED)


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("\\frac{1}{2}", "<answer>\\boxed{0.5}</answer>", 1.0),
        ("\\frac{1}{2}", "<answer>$\\frac{2}{4}$</answer>", 1.0),
        ("\\frac{1}{2}", "So it is \\boxed{1/2}.", 0.9),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}} <answer>\\boxed{2}</answer>", 0.1),
        ("\\frac{1}{2}", "\\frac{1}{2}", 0.0),
        ("\\frac{1}{2}", "", 0.0),
        # Repeating the question is no answer, although it has the same value.
        ("\\frac{1}{2}", "<answer>\\frac14 + \\frac14</answer>", 1.0),
        ("\\frac{1}{2}", "<answer>\\frac{1}{4} + \\frac{1}{4}</answer>", 0.1),
        ("6\\sqrt{5}", "<answer>\\sqrt{180}</answer>", 0.1),
        ("6\\sqrt{5}", "<answer>$6 \\sqrt 5$</answer>", 1.0),
        ("7", "<answer>3+4</answer>", 0.1),
        # Math-Verify ignores the base.
        ("4210_5", "<answer>4210_{5}</answer>", 1.0),
        ("4210_5", "<answer>4210</answer>", 1.0),
        ("4210_5", "<answer>4210_{6}</answer>", 0.1),
    ],
)
def test_fixed_rewards(tmp_path: Path, answer: str, text: str, reward: float) -> None:
    task, problems = _problems(tmp_path)
    grade = task.grade(problems[answer], text)
    assert grade.reward == reward == sum(grade.parts.values())
    assert grade.correct == (reward >= 0.9)


def test_the_d1_reward_compares_spelling_and_checks_an_opening_tag(tmp_path: Path) -> None:
    task, problems = _problems(tmp_path, reward="d1")
    problem = problems["\\frac{1}{2}"]
    for text, parts in [
        ("<answer>\\boxed{\\frac12}", {"correct": 2.0, "format": 0.75}),
        ("\\boxed{\\frac{2}{4}}", {"correct": 0.0, "format": 0.25}),
    ]:
        grade = task.grade(problem, text)
        assert grade.parts == parts
        assert grade.reward == sum(parts.values())
        assert grade.correct


@pytest.mark.parametrize(
    ("text", "fixed", "d1"),
    [
        ("\\boxed{\\frac12}", True, True),
        ("\\boxed{\\frac{2}{4}}", True, False),
        ("<answer>\\frac{1}{2}</answer>", True, False),
        ("\\boxed{\\frac{1}{2}} <answer>\\boxed{2}</answer>", False, False),
        ("<answer>2</answer> \\boxed{\\frac{1}{2}}", False, True),
        ("\\frac{1}{2}", False, True),
    ],
)
def test_answers_are_accepted_by_each_protocol(tmp_path: Path, text: str, fixed: bool, d1: bool) -> None:
    for protocol, correct in (("fixed", fixed), ("d1", d1)):
        task, problems = _problems(tmp_path, protocol=protocol)
        assert task.grade(problems["\\frac{1}{2}"], text).correct == correct


class _Slow(MathVerifier):
    def verify(self, gold: str, answer: str) -> AnswerVerdict:
        return AnswerVerdict(outcome=Outcome.TIMEOUT, detail="too slow")


def test_a_comparison_without_a_verdict_is_ungraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.tasks.math500.MathVerifier", _Slow)
    task, problems = _problems(tmp_path)
    grade = task.grade(problems["7"], "<answer>9^{9^{9}}</answer>")
    assert (grade.outcome, grade.detail, grade.correct) == (Outcome.TIMEOUT, "too slow", False)
    assert grade.parts == {"answer": 0.1, "correct": 0.0}


def test_d1s_rules_need_no_computer_algebra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.tasks.math500.MathVerifier", _Slow)
    task, problems = _problems(tmp_path, reward="d1", protocol="d1")
    assert task.grade(problems["7"], "\\boxed{7.0}").outcome is Outcome.GRADED


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"solution": "It is 7."},
            r'rows.jsonl, line 2: no answer in solution, "It is 7."; it should be in a \\boxed{}',
        ),
        ({"solution": "$\\boxed{}$"}, r"rows.jsonl, line 2: no answer in solution, "),
        ({"solution": "$\\boxed{7$"}, r"rows.jsonl, line 2: no answer in solution, "),
        ({"solution": "7", "answer": " "}, r'rows.jsonl, line 2: answer is " "; it should be a text'),
        ({"solution": "7", "answer": "$$"}, r"rows.jsonl, line 2: no answer in solution, "),
        ({"solution": "7", "answer": "7" * 1001}, "rows.jsonl, line 2: the answer has 1001 characters; 1000 can be"),
        ({}, "rows.jsonl, line 2 has no column solution; its columns are problem"),
    ],
)
def test_an_unmatchable_answer_is_refused(tmp_path: Path, row: dict[str, str], message: str) -> None:
    path = _write(tmp_path / "rows.jsonl", [_ROWS[0], {"problem": "What is it?", **row}])
    with pytest.raises(ValueError, match=message) as error:
        Math500(Math500Config(train_data=path)).problems(Split.TRAIN, 1, seed=0)
    assert "\n" not in str(error.value)


def test_a_published_generation_is_graded_by_its_text() -> None:
    for protocol in ("fixed", "d1"):
        task = Math500(Math500Config(protocol=protocol))
        problem = task.from_ground_truth("What is it?", "\\frac{1}{2}")
        assert task.grade(problem, "\\boxed{\\frac12}").correct
        assert not task.grade(problem, "\\boxed{2}").correct


@pytest.mark.parametrize("truth", [None, 7, "", " ", ["7"]])
def test_an_invalid_published_line_is_refused(truth: object) -> None:
    with pytest.raises(ValueError, match=r"^the ground truth is .*; a math500 line has a text$"):
        Math500(Math500Config()).from_ground_truth("What is it?", truth)


def test_the_name_selects_the_task() -> None:
    adapter: TypeAdapter[TaskConfig] = TypeAdapter(TaskConfig)
    assert adapter.validate_python({"name": "math500", "reward": "d1"}) == Math500Config(reward="d1")


def test_the_example_needs_no_data() -> None:
    task = Math500(Math500Config())
    example = task.example()
    assert example.answer == "\\frac{1}{2}"
    assert task.grade(example, example.reference_completion).reward == 1.0
