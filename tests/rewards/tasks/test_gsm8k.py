"""Tests of the GSM8K task: data, both reward rules, both evaluation protocols."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewards import Gsm8k, Gsm8kConfig, Outcome, Problem, Split
from rewards.problem import GradingRules

_ROWS = [
    ("How many legs have two cats?", "Each has <<4=4>>4.\n2 * 4 = <<2*4=8>>8\n#### 8"),
    ("What do 50 books for $25 cost?", "25 * 50 = $<<25*50=1250>>1,250\n#### 1,250"),
    ("It was 2 degrees, and fell by 5.", "2 - 5 = <<2-5=-3>>-3\n#### -3"),
]


def _write(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


def _problems(tmp_path: Path, **fields: object) -> tuple[Gsm8k, dict[str, Problem]]:
    path = _write(tmp_path / "rows.jsonl", _ROWS)
    task = Gsm8k(Gsm8kConfig.model_validate({"train_data": path, "heldout_data": path, **fields}))
    return task, {problem.answer: problem for problem in task.problems(Split.TRAIN, 3, seed=0)}


def test_a_rows_prompt_equals_d1s(tmp_path: Path) -> None:
    task, problems = _problems(tmp_path)
    assert task.size(Split.TRAIN) == 3
    assert problems.keys() == {"8", "1250", "-3"}
    (message,) = problems["8"].messages
    assert message.content == (
        "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
        "\n\nHow many legs have two cats?"
    )
    assert problems["8"].reference_completion == (
        "<reasoning>\nEach has 4.\n2 * 4 = 8\n</reasoning>\n<answer>\n8\n</answer>"
    )


def test_the_compact_style_is_the_question_and_the_answer(tmp_path: Path) -> None:
    _, problems = _problems(tmp_path, prompt="compact")
    assert problems["1250"].messages[0].content == "What do 50 books for $25 cost?"
    assert problems["1250"].reference_completion == "<answer>1,250</answer>"


@pytest.mark.parametrize("prompt", ["d1", "compact"])
def test_demonstrations_get_full_reward(tmp_path: Path, prompt: str) -> None:
    task, problems = _problems(tmp_path, prompt=prompt)
    for problem in problems.values():
        grade = task.grade(problem, problem.reference_completion)
        assert (grade.reward, grade.correct, grade.outcome) == (1.0, True, Outcome.GRADED)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>1250</answer>", 1.0),
        ("<answer>$1,250.00 in all</answer>", 1.0),
        ("<answer>\\boxed{1,250}</answer>", 1.0),
        ("It is \\boxed{1250}.", 0.9),
        ("<answer>1</answer>", 0.1),
        ("<answer>1250 or 1251</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer></answer> \\boxed{1250}", 1.0),
        ("1250", 0.0),
        ("", 0.0),
    ],
)
def test_fixed_rewards(tmp_path: Path, text: str, reward: float) -> None:
    task, problems = _problems(tmp_path)
    grade = task.grade(problems["1250"], text)
    assert grade.reward == reward == sum(grade.parts.values())
    assert grade.correct == (reward >= 0.9)


def test_the_d1_reward_compares_text_and_penalizes_length(tmp_path: Path) -> None:
    task, problems = _problems(tmp_path, reward="d1")
    problem = problems["1250"]
    strict = "<reasoning>\nx\n</reasoning>\n<answer>\n{}\n</answer>\n"
    as_written = task.grade(problem, strict.format("1,250"))
    assert as_written.parts == {
        "xml_count": 0.5,
        "soft_format": 0.0,
        "strict_format": 0.5,
        "integer": 0.0,
        "correct": 2.0,
    }
    assert (as_written.reward, as_written.correct) == (3.0, True)
    otherwise = task.grade(problem, strict.format("1250"))
    assert (otherwise.parts["correct"], otherwise.parts["integer"], otherwise.correct) == (0.0, 0.5, True)
    assert task.grade(problem, "<answer>\n</answer>" + "x" * 1000).reward < 0.0


@pytest.mark.parametrize(
    ("text", "fixed", "d1"),
    [
        ("\\boxed{1250}", True, True),
        ("\\boxed{1,250}", True, False),
        ("\\boxed{1250\n}", True, False),
        ("\\boxed{1250} and then \\boxed{7}", False, True),
        ("<answer>5 * 250 makes 1250</answer>", False, True),
        ("<answer>1_250</answer>", False, True),
        ("1250", False, False),
    ],
)
def test_answers_are_accepted_by_each_protocol(tmp_path: Path, text: str, fixed: bool, d1: bool) -> None:
    rules: list[tuple[GradingRules, bool]] = [("fixed", fixed), ("d1", d1)]
    for protocol, correct in rules:
        task, problems = _problems(tmp_path, protocol=protocol)
        assert task.grade(problems["1250"], text).correct == correct


def test_d1s_reader_of_the_data_misses_negative_numbers(tmp_path: Path) -> None:
    for protocol, correct in (("fixed", True), ("d1", False)):
        task, problems = _problems(tmp_path, protocol=protocol)
        assert task.grade(problems["-3"], "\\boxed{-3}").correct == correct


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("just 8", r'rows.jsonl, line 2: answer is "just 8"; it should end in #### and a number'),
        ("it is\n#### eight", r'rows.jsonl, line 2: answer ends in "eight"; after #### it should have a number'),
        ("####", 'rows.jsonl, line 2: answer ends in ""; after #### it should have a number'),
        ("", 'rows.jsonl, line 2: answer is ""; it should be a text that says something'),
    ],
)
def test_an_unmatchable_answer_is_refused(tmp_path: Path, answer: str, message: str) -> None:
    path = _write(tmp_path / "rows.jsonl", [_ROWS[0], ("How many?", answer)])
    with pytest.raises(ValueError, match=message) as error:
        Gsm8k(Gsm8kConfig(train_data=path)).problems(Split.TRAIN, 1, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("truth", [8, 8.0, 1250.5, -3.0])
def test_a_published_generation_is_graded_by_its_number(truth: float) -> None:
    for protocol in ("fixed", "d1"):
        task = Gsm8k(Gsm8kConfig(protocol=protocol))
        problem = task.from_ground_truth("How many?", truth)
        assert task.grade(problem, f"\\boxed{{{truth}}}").correct
        assert not task.grade(problem, "\\boxed{9}").correct


def test_a_published_generation_without_a_number_is_wrong() -> None:
    for protocol in ("fixed", "d1"):
        task = Gsm8k(Gsm8kConfig(protocol=protocol))
        for text in ("\\boxed{}", "\\boxed{None}", "\\boxed{0}", "", "\\boxed{nan}"):
            assert not task.grade(task.from_ground_truth("How many?", None), text).correct


@pytest.mark.parametrize("truth", ["18", "$1,250.50", "-3", "2 + 6 = 8\n#### 1,008"])
def test_a_published_number_may_be_a_string(truth: str) -> None:
    problem = Gsm8k(Gsm8kConfig()).from_ground_truth("How many?", truth)
    assert Gsm8k(Gsm8kConfig()).grade(problem, f"<answer>{truth.rpartition('#')[2]}</answer>").reward == 1.0


@pytest.mark.parametrize("truth", ["eight", "", "9" * 200, True, [8], float("nan"), float("inf"), 10**400])
def test_an_invalid_published_line_is_refused(truth: object) -> None:
    with pytest.raises(ValueError, match=r"^the ground truth is .*; a gsm8k line has a number$"):
        Gsm8k(Gsm8kConfig()).from_ground_truth("How many?", truth)


def test_the_example_needs_no_data() -> None:
    task = Gsm8k(Gsm8kConfig())
    example = task.example()
    assert example.answer == "10"
    assert task.grade(example, example.reference_completion).reward == 1.0
