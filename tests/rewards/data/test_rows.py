"""Tests of locating values in rows of third-party data."""

from __future__ import annotations

from typing import Any

import pytest

from rewards.data.rows import leaves, value_at

ROW = {
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "answers": {"text": ["a", "b"]},
    "as_json": '{"target": ["c"]}',
    "turns": [{"content": "d"}],
    "dotted.name": "e",
    "dotted": {"name": "not this", "other": "f"},
    "a.b": {"c": "g"},
    "a": {"x": 1},
    "nothing": None,
    "text": "h",
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text", "h"),
        ("reward_model.ground_truth", "7"),
        ("answers.text", ["a", "b"]),
        ("answers.text.1", "b"),
        ("as_json.target.0", "c"),
        ("turns.0.content", "d"),
        ("dotted.name", "e"),
        ("dotted.other", "f"),
        ("a.b.c", "g"),
        ("nothing", None),
        ("nothing.at.all", None),
    ],
)
def test_paths_index_columns_lists_and_json(path: str, value: Any) -> None:
    assert value_at(ROW, path) == value


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("rewardmodel.ground_truth", "there is no column rewardmodel.ground_truth; the columns are a, a.b, answers, "),
        ("reward_model.truth", "reward_model has no truth; it has ground_truth, style"),
        ("answers.text.2", "answers.text has no 2; it has a list of 2, counted from 0"),
        ("answers.text.-1", "answers.text has no -1; it has a list of 2"),
        ("text.more", 'text is "h", which has no more inside'),
        ("a.b.d", "a.b has no d; it has c"),
    ],
)
def test_invalid_paths_say_where_they_end(path: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - compared below, without escapes
        value_at(ROW, path)
    assert str(refusal.value).startswith(sentence)


def test_top_level_leaves_come_before_nested_ones() -> None:
    row = {"extra": {"answer": "1", "more": {"deep": {"deeper": 1}}}, "answer": "2", "null": None}
    assert list(leaves(row)) == [("answer", "answer"), ("extra.answer", "answer")]
