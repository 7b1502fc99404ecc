"""Tests of the sums task: running sums modulo m, split by the set of operands."""

from __future__ import annotations

from itertools import permutations

import pytest
from pydantic import ValidationError

from rewards import Problem, Split, Sums, SumsConfig


def _all_problems(config: SumsConfig) -> dict[str, Problem]:
    """Return all problems of both splits by prompt, using the count that the error message reports."""
    sums = Sums(config)
    problems: dict[str, Problem] = {}
    for split in Split:
        with pytest.raises(ValueError, match=f"the {split} split of sums has") as error:
            sums.problems(split, 10**6, seed=0)
        count = int(str(error.value).split(" has ")[1].split()[0])
        problems |= {problem.messages[0].content: problem for problem in sums.problems(split, count, seed=0)}
    return problems


@pytest.mark.parametrize(
    ("modulus", "prompt", "answer"),
    [(10, "3 7 9", "309"), (10, "0 0 0", "000"), (10, "9 9 9", "987"), (5, "3 7 9", "304"), (2, "1 1 1", "101")],
)
def test_answers_are_running_sums(modulus: int, prompt: str, answer: str) -> None:
    problem = _all_problems(SumsConfig(modulus=modulus))[prompt]
    assert problem.answer == answer
    assert problem.reference_completion == f"<answer>{answer}</answer>"


def test_the_splits_partition_all_problems() -> None:
    problems = _all_problems(SumsConfig())
    assert len(problems) == 1_000
    assert len({problem.problem_id for problem in problems.values()}) == 1_000


def test_asking_for_too_many_problems_says_how_many_exist() -> None:
    with pytest.raises(ValueError, match=r"^the train split of sums has \d+ problems .* but 1001 were asked for$"):
        Sums(SumsConfig()).problems(Split.TRAIN, 1_001, seed=0)


def test_no_permutation_of_a_heldout_problem_is_in_train() -> None:
    sums = Sums(SumsConfig())
    train = {problem.messages[0].content for problem in sums.problems(Split.TRAIN, 600, seed=0)}
    for problem in sums.problems(Split.HELDOUT, 100, seed=0):
        orders = {" ".join(order) for order in permutations(problem.messages[0].content.split())}
        assert train.isdisjoint(orders)


@pytest.mark.parametrize(
    ("text", "reward", "correct"),
    [
        ("<answer>309</answer>", 1.0, True),
        ("<answer>3 0 9</answer>", 1.0, True),
        ("<answer>308</answer>", 2 / 3, False),
        ("<answer>30</answer>", 2 / 3, False),
        ("<answer>3099</answer>", 1.0, False),
        ("<answer>093</answer>", 0.0, False),
        ("<answer></answer>", 0.0, False),
        ("<answer>309", 0.0, False),
        ("309", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_reward_is_the_fraction_of_right_digits(text: str, reward: float, correct: bool) -> None:
    problem = Problem(problem_id="p", messages=(), answer="309", reference_completion="")
    grade = Sums(SumsConfig()).grade(problem, text)
    assert (grade.reward, grade.correct) == (reward, correct)
    assert grade.parts == {"digits": reward}


def test_num_terms_is_the_length_of_prompt_and_answer() -> None:
    for problem in Sums(SumsConfig(num_terms=5)).problems(Split.HELDOUT, 50, seed=0):
        assert len(problem.messages[0].content.split()) == len(problem.answer) == 5


@pytest.mark.parametrize("fields", [{"num_terms": 1}, {"num_terms": 6}, {"modulus": 11}, {"modulus": 1}, {"terms": 3}])
def test_a_wrong_config_names_the_field(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        SumsConfig.model_validate(fields)
