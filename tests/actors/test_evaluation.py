"""Which version of the rounds is the best so far."""

from __future__ import annotations

from typing import Any

from actors.evaluation import best_version


def _evaluation(version: int, num_correct: int, label: str = "round") -> dict[str, Any]:
    return {
        "event": "evaluation",
        "label": label,
        "policy_version": version,
        "num_correct": num_correct,
        "num_problems": 10,
    }


def test_the_best_is_the_oldest_of_those_with_the_highest_accuracy() -> None:
    assert best_version([_evaluation(3, 4), _evaluation(5, 6), _evaluation(7, 6), _evaluation(9, 5)]) == 5


def test_only_the_rounds_count() -> None:
    others = [_evaluation(0, 9, "untrained"), _evaluation(1, 9, "sft"), _evaluation(12, 9, "control")]
    assert best_version(others) is None
    assert best_version([*others, _evaluation(11, 2, "rl")]) == 11


def test_a_future_that_was_given_up_counts_no_more() -> None:
    again = {"event": "round", "round": 3, "policy_version": 5}
    assert best_version([_evaluation(4, 3), _evaluation(6, 9), again, _evaluation(5, 2)]) == 4
