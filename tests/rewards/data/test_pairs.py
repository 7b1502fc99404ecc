"""Reading of preference pairs, in the forms of TRL's preference format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rewards.data.pairs import PreferencePair, read_pairs
from rewards.problem import Message


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER, RIGHT, WRONG = _turn("user", "2 + 2"), _turn("assistant", "4"), _turn("assistant", "5")
SYSTEM, LATER = _turn("system", "Be brief."), _turn("user", "Thanks.")


def _read(tmp_path: Path, *rows: Any) -> list[PreferencePair]:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_pairs(path))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG], "score": 0.7},
        {"prompt": [USER], "chosen": "4", "rejected": [WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "2 + 2 ", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": None, "chosen": json.dumps([USER, RIGHT]), "rejected": json.dumps([USER, WRONG])},
    ],
)
def test_a_row_in_any_form_is_the_same_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = _read(tmp_path, row)
    assert pair.messages == (Message(role="user", content="2 + 2"),)
    assert (pair.chosen, pair.rejected) == ("4", "5")


def test_the_shared_prefix_is_the_prompt_with_all_of_its_turns(tmp_path: Path) -> None:
    before = [SYSTEM, USER, RIGHT, LATER]
    pairs = _read(
        tmp_path,
        {"chosen": [*before, RIGHT], "rejected": [*before, WRONG]},
        {"prompt": "Thanks.", "chosen": [*before, RIGHT], "rejected": [*before, WRONG]},
        {"prompt": before, "chosen": [RIGHT], "rejected": [WRONG]},
    )
    for pair in pairs:
        assert [(turn.role, turn.content) for turn in pair.messages] == [(t["role"], t["content"]) for t in before]
    assert [pair.place.rpartition(", ")[2] for pair in pairs] == ["line 1", "line 2", "line 3"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "2 + 2", "chosen": "4"}, "it has chosen, prompt, and rejected is missing"),
        ({"question": "2 + 2"}, "it has question, and chosen and rejected are missing; it should have prompt, chosen"),
        ({"chosen": "4", "rejected": "5"}, "prompt is missing; it should be a text or a list of turns"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "prompt is missing"),
        ({"prompt": "2 + 2", "chosen": "4", "rejected": " "}, "rejected is empty; it should be the assistant's answer"),
        ({"prompt": "2 + 2", "chosen": "4", "rejected": "4"}, "chosen and rejected are equal"),
        ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "chosen and rejected are equal"),
        ({"chosen": [USER, RIGHT], "rejected": [LATER, WRONG]}, "chosen and rejected have no common prompt"),
        ({"chosen": [USER, RIGHT], "rejected": "5"}, "chosen and rejected have no common prompt"),
        ({"prompt": "1", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "do not begin with prompt"),
        ({"prompt": [USER, RIGHT], "chosen": "4", "rejected": "5"}, "prompt ends with the assistant's turn"),
        ({"chosen": [USER], "rejected": [USER]}, "chosen ends with the user's turn"),
        ({"prompt": "1", "chosen": [RIGHT, LATER, RIGHT], "rejected": [WRONG]}, "chosen has 3 turns after the prompt"),
        ({"prompt": "1", "chosen": 4, "rejected": "5"}, "chosen is 4; it should be a list that ends with"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_line(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    good = {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        _read(tmp_path, good, row)
    assert str(refused.value).startswith(f"{tmp_path / 'pairs.jsonl'}, line 2: ")
    assert "\n" not in str(refused.value)
