"""Tests of the Countdown task: d1's rewards and prompt, solvable problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from rewards import Countdown, CountdownConfig, Problem, Split, evaluate
from rewards.first_d1.python_arithmetic import evaluate_python_arithmetic

_D1_TURN = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

Using only the numbers [{shown}], create an arithmetic expression that evaluates to exactly {target}. You must use all \
numbers from the list, and each number must be used exactly once. You may use the operations +, -, *, and / as needed. \
After reasoning, provide only your final expression inside <answer></answer> tags without including an equals sign or \
the target number. For example, if the numbers are [2, 3, 4] and the target is 5, a valid answer is: <answer>
2*4-3
</answer>"""


def _problem(numbers: str, target: int) -> Problem:
    return Problem(
        problem_id="p", messages=(), answer=str(target), reference_completion="", metadata={"numbers": numbers}
    )


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>2*4-3</answer>", 1.0),
        ("<reasoning>\nhm\n</reasoning>\n<answer>\n2*4-3\n</answer>", 1.0),
        ("<answer>4 * 2 - 3</answer>", 1.0),
        ("<answer>(4*2)-3</answer>", 1.0),
        ("<answer>1</answer> wait <answer>2*4-3</answer>", 1.0),
        ("<answer>2*4-3</answer> wait <answer>2+4-3</answer>", 0.1),
        ("<answer>2+4-3</answer>", 0.1),
        ("<answer>2+3</answer>", 0.1),
        ("<answer>5</answer>", 0.1),
        ("<answer>2*4-3+4-4</answer>", 0.1),
        ("<answer>2*4-3=9</answer>", 0.1),
        ("<answer>2*4-3=x</answer>", 0.1),
        ("<answer>2x4-3</answer>", 1.0),
        (r"<answer>\boxed{2*4-3}</answer>", 1.0),
        (r"<answer>$2 \times 4 - 3$</answer>", 1.0),
        (r"\boxed{4-3+\frac{8}{2}}", 0.1),
        (r"\boxed{4 \cdot 2 - 3 = 5}", 1.0),
        ("<answer></answer>", 0.1),
        ("<answer>2*4-3</answer><answer></answer>", 0.1),
        ("<answer>2*4-3", 0.0),
        ("2*4-3", 0.0),
        ("", 0.0),
        # Accepted by d1's eval, rejected here.
        ("<answer>-3+2*4</answer>", 0.1),
        ("<answer>(2*4\n-3)</answer>", 0.1),
    ],
)
def test_fixed_rewards(text: str, reward: float) -> None:
    grade = Countdown(CountdownConfig()).grade(_problem("2 3 4", 5), text)
    assert grade.reward == reward
    assert grade.correct == (reward == 1.0)
    assert list(grade.parts) == ["answer", "correct"]
    assert sum(grade.parts.values()) == grade.reward


@pytest.mark.parametrize(
    "text",
    [
        "<answer>44 + 19 + 35.</answer>",
        "<answer>44 + 19 + 35 = 98</answer>",
        "<answer>98 = 44 + 19 + 35</answer>",
        "<answer>`44+19+35`</answer>",
        "<answer>```\n44 + 19 + 35\n```</answer>",
        "<answer>**44 + 19 + 35** = 98</answer>",
        "<answer>**Answer:** 44 + 19 + 35</answer>",
        "<answer>The answer is 44 + 19 + 35 = 98, which uses each number once.</answer>",
        r"<answer>44 + 19 + 35 = \boxed{98}</answer>",
        r"We find $44 + 19 + 35 = \boxed{98}$.",
        r"Using 44, 19 and 35 we get \boxed{44+19+35} = 98.",
        "<answer>Step 1: 44 + 19 = 63\nStep 2: 63 + 35 = 98\nSo 44 + 19 + 35 = 98</answer>",
        "<answer>44 + 19 + 35 = 63 + 35 = 98</answer>",
        "<answer>44 + 19 + 35\nThis equals 98.</answer>",
        "<answer>44 + 19 = 63\n63 + 35 = 98\n(44 + 19) + 35</answer>",
        "<answer>44 + 19 + 35; 35 + 44 + 19</answer>",
        "<answer>\u200b44 + 19 \\+ 35\ufeff</answer>",
    ],
)
def test_right_expressions_are_accepted_in_every_notation(text: str) -> None:
    assert Countdown(CountdownConfig()).grade(_problem("19 35 44", 98), text).reward == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<answer>44+19+35 = 97</answer>",
        "<answer>44+19+35\n= 97</answer>",
        "<answer>44+19+35 = 98 = 97</answer>",
        "<answer>97 = 44+19+35</answer>",
        r"<answer>\boxed{44+19+35} = 97</answer>",
        "<answer>= 98</answer>",
        "<answer>98</answer>",
        r"So it is \boxed{98}",
        "<answer>98 = 98</answer>",
        "<answer>44 + 19 = 63; 63 + 35 = 98</answer>",
        "<answer>44+19+35 = 98; 1+1 = 2</answer>",
        "<answer>44+19+35 or 44*19-35</answer>",
        "<answer>44, 19, 35 = 98</answer>",
        "<answer>44 + 19 + 35 - 44*0</answer>",
        "<answer>44 + 19 + 35 = 98!</answer>",
        "<answer>44 + 19 + 35 + 1/0</answer>",
        "<answer>44*19*35, 44+19+35</answer>",
        "<answer>44+19+35\n44*19-35</answer>",
        "<answer>44-19+35 = 98; 44+19+35</answer>",
        "<answer>1. 44-19+35\n2. 44+19+35</answer>",
        r"\boxed{44*19*35} or \boxed{44+19+35}",
        r"<answer>\boxed{44-19+35}, \boxed{44+19+35}</answer>",
        "<answer>44+19+35 is wrong</answer>",
    ],
)
def test_a_wrong_side_a_bare_target_and_several_statements_earn_nothing(text: str) -> None:
    assert Countdown(CountdownConfig()).grade(_problem("19 35 44", 98), text).reward == 0.1


def test_a_wrong_equation_is_graded_by_its_worst_side() -> None:
    grade = Countdown(CountdownConfig(shaping=0.2)).grade(_problem("2 3 4", 5), "<answer>2*4-3 = 8</answer>")
    assert (grade.correct, grade.parts["numbers"], grade.parts["close"]) == (False, 0.2, 0.05)


@pytest.mark.parametrize(
    ("text", "working"),
    [
        ("2*4=8;8-3=5<answer>2*4-3</answer>", 0.5),
        ("<reasoning>\n2*4 = 8\n8-3 = 5\n</reasoning>\n<answer>\n2*4-3\n</answer>", 0.5),
        ("2*4=8;8-3=4<answer>2*4-3</answer>", 0.25),
        ("1+1=2;8-3=5<answer>2*4-3</answer>", 0.0),
        ("<answer>2*4-3</answer>", 0.0),
        ("2*4=8;8-3=5", 0.0),
        ("<answer>2*4-3</answer>2*4=8;8-3=5", 0.0),
    ],
)
def test_working_before_the_answer_earns_its_right_steps(text: str, working: float) -> None:
    problem = _problem("2 3 4", 5)
    grade = Countdown(CountdownConfig(working=0.5)).grade(problem, text)
    plain = Countdown(CountdownConfig()).grade(problem, text)
    assert grade.parts == {**plain.parts, "working": working}
    assert grade.reward == plain.reward + working
    assert grade.correct == plain.correct


def test_a_problem_of_one_number_has_no_working() -> None:
    grade = Countdown(CountdownConfig(working=0.5)).grade(_problem("7", 7), "7=7<answer>7</answer>")
    assert (grade.parts["working"], grade.correct) == (0.0, True)


def test_compact_demonstrations_show_their_working_where_asked() -> None:
    plain, shown = (
        Countdown(CountdownConfig(prompt="compact", max_number=9, working=0.5, show_working=shows))
        for shows in (False, True)
    )
    problems = zip(plain.problems(Split.TRAIN, 200, 0), shown.problems(Split.TRAIN, 200, 0), strict=True)
    for without, problem in problems:
        assert problem.reference_completion.endswith(without.reference_completion)
        assert problem.messages == without.messages
        assert shown.grade(problem, problem.reference_completion).parts["working"] == 0.5
        assert shown.grade(problem, without.reference_completion).parts["working"] == 0.0


def test_hidden_working_is_refused() -> None:
    with pytest.raises(ValidationError, match="demonstrations of prompt d1 show it anyway"):
        CountdownConfig(show_working=True)
    with pytest.raises(ValidationError, match=r"working is 0\.5, and reward d1 has no such parts"):
        CountdownConfig(working=0.5, reward="d1")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>2*4-3</answer>", 1.0),
        ("<answer>-3+2*4</answer>", 1.0),
        ("<answer>(2*4\n-3)</answer>", 1.0),
        ("<answer>2**(4-3)+3</answer>", 0.1),
        ("<answer>2*4-3=5</answer>", 0.1),
        (r"<answer>\boxed{2*4-3}</answer>", 0.1),
        (r"\boxed{2*4-3}", 0.0),
        ("<answer>2*4-3", 0.0),
    ],
)
def test_d1_rewards(text: str, reward: float) -> None:
    assert Countdown(CountdownConfig(reward="d1")).grade(_problem("2 3 4", 5), text).reward == reward


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [
        (r"\boxed{2*4-3}", True),
        (r"\boxed{2 \times 4 - 3 = 7}", True),
        ("2*4-3", True),
        ("2*4-3 = 5", True),
        ("so 2*4-3", False),
        ("<answer>2*4-3</answer>", False),
        (r"<answer>2*4-3</answer> \boxed{", True),
    ],
)
def test_the_d1_protocol(text: str, is_correct: bool) -> None:
    assert Countdown(CountdownConfig(protocol="d1")).grade(_problem("2 3 4", 5), text).correct == is_correct


def test_our_evaluation_accepts_what_d1s_accepts() -> None:
    for expression, value in {"2**3//3": 2, "2.5*2": 5, "-3+8": 5, "+3": 3, "4--1": 5, "(2\n+3)": 5}.items():
        assert evaluate_python_arithmetic(expression) == value, expression
    for nothing in (
        "",
        "()",
        "2(3)",
        "07",
        "1/0",
        "99**99**99",
        "2**-99999",
        "9**9**9",
        "\u0661",
        "(" * 250,
        "1e5",
        "2;3",
    ):
        assert evaluate_python_arithmetic(nothing) is None, nothing


@pytest.mark.parametrize(
    "truth", [[[2, 3], 5], {"target": 5, "numbers": [2, 3]}, {"nums": [2, 3], "target": 5, "style": "rule"}]
)
def test_a_line_has_numbers_and_target_as_a_list_or_an_object(truth: object) -> None:
    task = Countdown(CountdownConfig())
    assert [
        task.grade(task.from_ground_truth("?", truth), f"<answer>{sum_}</answer>").correct for sum_ in ("2+3", "2*3")
    ] == [1, 0]


@pytest.mark.parametrize(
    "truth", [None, 5, [5], [[], 5], [["a"], 5], [[1, 2], "5"], [[1, True], 5], {"numbers": 5, "target": 5}]
)
def test_a_line_without_numbers_and_target_is_refused(truth: object) -> None:
    with pytest.raises(ValueError, match=r"a countdown line has \[\[numbers\], target\]"):
        Countdown(CountdownConfig()).from_ground_truth("?", truth)


@pytest.mark.parametrize(
    ("numbers", "target", "answer"),
    [
        ("2 3 4", 2, "2**3/4"),
        ("7 2 1", 3, "7//2*1"),
        ("2 5 3", 5, "2.5*3-3+0.5"),
        ("2 5 2", 5, "2.5*2"),
        ("3 4 12", 12, "03*4*12/12"),
        ("1 2 3", 6, "\u0661+\u0662+\u0663"),
        ("5 5 1", 5, "5*1/(5-5)"),
    ],
)
def test_other_python_operators_are_illegal(numbers: str, target: int, answer: str) -> None:
    grade = Countdown(CountdownConfig()).grade(_problem(numbers, target), f"<answer>{answer}</answer>")
    assert (grade.reward, grade.correct) == (0.1, False)


def test_values_are_compared_exactly() -> None:
    countdown = Countdown(CountdownConfig(num_numbers=4))
    assert countdown.grade(_problem("3 8 8 3", 24), "<answer>8/(3-8/3)</answer>").correct
    assert not countdown.grade(_problem("1 999999 2 2", 1), "<answer>1-2/999999/2</answer>").correct


def test_a_number_given_twice_is_used_twice() -> None:
    countdown = Countdown(CountdownConfig())
    assert countdown.grade(_problem("5 5 2", 8), "<answer>5+5-2</answer>").correct
    assert not countdown.grade(_problem("5 5 2", 3), "<answer>5-2</answer>").correct


def test_operators_outside_the_config_are_illegal() -> None:
    countdown = Countdown(CountdownConfig(operators=("+", "-"), prompt="compact"))
    assert countdown.grade(_problem("2 3 4", 3), "<answer>2+4-3</answer>").correct
    assert countdown.grade(_problem("2 3 4", 5), "<answer>2*4-3</answer>").reward == 0.1


def test_the_d1_prompt_equals_d1s() -> None:
    (problem,) = Countdown(CountdownConfig()).problems(Split.TRAIN, 1, seed=3)
    shown = problem.metadata["numbers"].replace(" ", ", ")
    (message,) = problem.messages
    assert message.role == "user"
    assert message.content == _D1_TURN.format(shown=shown, target=problem.answer)


def test_the_d1_demonstration_has_d1s_format() -> None:
    for problem in Countdown(CountdownConfig()).problems(Split.TRAIN, 20, seed=3):
        reasoning, answer = problem.reference_completion.split("\n</reasoning>\n<answer>\n")
        assert reasoning.startswith("<reasoning>\n")
        assert reasoning.endswith(f" = {problem.answer}")
        assert answer.endswith("\n</answer>")


def test_the_compact_prompt_is_numbers_and_target() -> None:
    for problem in Countdown(CountdownConfig(prompt="compact", max_number=9)).problems(Split.TRAIN, 20, seed=3):
        assert problem.messages[0].content == f"{problem.metadata['numbers']} = {problem.answer}"
        assert problem.reference_completion.startswith("<answer>")
        assert problem.reference_completion.endswith("</answer>")


def test_problems_stay_in_the_configured_range() -> None:
    config = CountdownConfig(num_numbers=4, min_number=3, max_number=12, max_target=40)
    for problem in Countdown(config).problems(Split.TRAIN, 500, seed=0):
        numbers = [int(number) for number in problem.metadata["numbers"].split()]
        assert len(numbers) == 4
        assert all(3 <= number <= 12 for number in numbers)
        assert 1 <= int(problem.answer) <= 40


def test_problems_use_all_operators_with_shuffled_numbers() -> None:
    problems = Countdown(CountdownConfig(max_number=12, prompt="compact")).problems(Split.TRAIN, 500, seed=0)
    assert set("+-*/") <= set("".join(problem.reference_completion.replace("</", "") for problem in problems))
    shown = [[int(number) for number in problem.metadata["numbers"].split()] for problem in problems]
    assert sum(numbers == sorted(numbers) for numbers in shown) < 250


def test_no_set_of_numbers_is_in_two_splits() -> None:
    countdown = Countdown(CountdownConfig(max_number=9, prompt="compact", validation_fraction=0.2))
    train, validation, heldout = (
        {tuple(sorted(problem.metadata["numbers"].split())) for problem in countdown.problems(split, 200, seed=0)}
        for split in Split
    )
    assert train.isdisjoint(heldout)
    assert train.isdisjoint(validation)
    assert validation.isdisjoint(heldout)


def test_validation_is_taken_from_training_only() -> None:
    without, with_it = (Countdown(CountdownConfig(max_number=9, validation_fraction=part)) for part in (0.0, 0.2))
    assert with_it.problems(Split.HELDOUT, 50, seed=0) == without.problems(Split.HELDOUT, 50, seed=0)
    with pytest.raises(ValueError, match=r"^the validation split of countdown has 0 problems .* but 1 were asked for$"):
        without.problems(Split.VALIDATION, 1, seed=0)


def test_equal_ids_have_equal_prompts_whatever_the_seed() -> None:
    countdown = Countdown(CountdownConfig(max_number=5))
    first, second = (
        {problem.problem_id: problem.messages for problem in countdown.problems(Split.TRAIN, 200, seed)}
        for seed in (0, 1)
    )
    common = first.keys() & second.keys()
    assert len(common) > 50
    assert all(first[problem_id] == second[problem_id] for problem_id in common)


def test_ids_are_unique_up_to_the_order_of_the_numbers() -> None:
    problems = Countdown(CountdownConfig(max_number=5)).problems(Split.TRAIN, 200, seed=0)
    posed = {(tuple(sorted(problem.metadata["numbers"].split())), problem.answer) for problem in problems}
    assert len(posed) == 200


def test_an_exhausted_split_says_how_many_problems_it_has() -> None:
    # 1+1, 1*1, 2*1, 2-1, 2/2: each combination of numbers and target occurs once.
    countdown = Countdown(CountdownConfig(num_numbers=2, max_number=2, max_target=2, heldout_fraction=0.05))
    with pytest.raises(ValueError, match=r"^the train split of countdown has 5 problems .* but 1000 were asked for$"):
        countdown.problems(Split.TRAIN, 1000, seed=0)


def test_the_longest_demonstrations_are_within_the_evaluators_bound() -> None:
    config = CountdownConfig(num_numbers=6, min_number=1000, max_number=1000, max_target=100_000, prompt="compact")
    (problem,) = Countdown(config.model_copy(update={"heldout_fraction": 0.0})).problems(Split.TRAIN, 1, seed=0)
    answer = problem.reference_completion.removeprefix("<answer>").removesuffix("</answer>")
    assert evaluate(answer) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_number": 10, "max_number": 9}, "max_number is 9; it must be at least min_number = 10"),
        ({"operators": ("+", "+"), "prompt": "compact"}, "each operator must be listed once"),
        ({"operators": ("+", "-")}, "prompt d1 names all four"),
        ({"operators": (), "prompt": "compact"}, "at least 1 item"),
        ({"operators": ("**",)}, "operators"),
        ({"num_numbers": 1}, "num_numbers"),
        ({"max_target": 0}, "max_target"),
        ({"heldout_fraction": 1.0}, "heldout_fraction"),
        ({"prompt": "qwen"}, "prompt"),
        ({"target": 5}, "target"),
    ],
)
def test_a_wrong_config_names_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CountdownConfig.model_validate(fields)


def _file(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_generated_problems_exclude_the_numbers_of_a_file(tmp_path: Path) -> None:
    rows = [{"nums": [4, 2, 3], "target": 5}, {"input": "2,2,9", "output": "13"}]
    path = _file(tmp_path / "x.jsonl", *rows)
    task = Countdown(CountdownConfig(heldout_data=path, num_numbers=3, max_number=4, prompt="compact"))
    heldout = task.problems(Split.HELDOUT, 2, seed=0)
    assert {problem.problem_id for problem in heldout} == {"countdown/2,3,4=5", "countdown/2,2,9=13"}
    assert {problem.messages[0].content for problem in heldout} == {"4 2 3 = 5", "2 2 9 = 13"}
    assert all(task.grade(p, "<answer>2*2+9</answer>").correct == (p.answer == "13") for p in heldout)
    made = task.problems(Split.TRAIN, 150, seed=0)
    assert not any(problem.problem_id.startswith("countdown/2,3,4=") for problem in made)
    assert (task.size(Split.HELDOUT), task.size(Split.TRAIN)) == (2, None)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"nums": "a,2", "target": 3}, 'line 1: nums is "a,2"; it should be whole numbers'),
        ({"nums": [], "target": 3}, r"line 1: nums is \[\]; it should be whole numbers"),
        ({"nums": [1, 2], "target": 2.5}, "line 1: target is 2.5; it should be whole numbers"),
        ({"nums": [3, 4.5, 5], "target": 8}, r"line 1: nums is \[3, 4.5, 5\]; it should be whole numbers"),
        ({"nums": [1, 2]}, "line 1 has no column target; its columns are nums"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: dict[str, object], sentence: str) -> None:
    task = Countdown(CountdownConfig(train_data=_file(tmp_path / "x.jsonl", row)))
    with pytest.raises(ValueError, match=sentence):
        task.problems(Split.TRAIN, 1, seed=0)


@pytest.mark.parametrize(
    ("text", "numbers", "close", "correct"),
    [
        ("<answer>2*4-3</answer>", 0.3, 0.3, True),
        ("<answer>2*4+3</answer>", 0.3, 0.3 / 7, False),
        ("<answer>2-4*3</answer>", 0.3, 0.3 / 16, False),
        ("<answer>4/3-2</answer>", 0.3, 0.3 * 3 / 20, False),
        ("<answer>5</answer>", 0.0, 0.0, False),
        ("<answer>2+3</answer>", 0.0, 0.0, False),
        ("<answer>2*4-3+4-4</answer>", 0.0, 0.0, False),
        ("2*4-3", 0.0, 0.0, False),
    ],
)
def test_shaping_rewards_the_right_numbers_and_then_closeness(
    text: str, numbers: float, close: float, correct: bool
) -> None:
    """There is no reward for the bare target, nor for other numbers that evaluate to it."""
    grade = Countdown(CountdownConfig(shaping=0.3)).grade(_problem("2 4 3", 5), text)
    assert (grade.parts["numbers"], grade.parts["close"]) == pytest.approx((numbers, close))
    assert grade.correct is correct
    assert grade.reward == pytest.approx(sum(grade.parts.values()))


def test_d1s_reward_is_not_shaped() -> None:
    assert set(Countdown(CountdownConfig()).grade(_problem("2 4 3", 5), "").parts) == {"answer", "correct"}
    with pytest.raises(ValidationError, match=r"shaping is 0\.3, and reward d1 has no such parts"):
        CountdownConfig(shaping=0.3, reward="d1")
