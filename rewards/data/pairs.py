"""Preference pairs: two completions of one prompt, a chosen and a rejected one.

A file of rows, as `rewards.data.rows` reads them, in TRL's preference format. Each has one of these, and possibly other
columns:

    {"prompt": ..., "chosen": ..., "rejected": ...}     each a text or a list of turns; completions have one turn
    {"chosen": [..., ...], "rejected": [..., ...]}      whole conversations, which differ in the last turn alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.data.conversation import is_turns, parse_conversation, text_of, turns_of
from rewards.data.rows import json_in
from rewards.data.sources import rows_of
from rewards.problem import Message

_KEYS = ("chosen", "rejected")
_ANSWER = "the assistant's answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two completions of one prompt."""

    messages: tuple[Message, ...]
    """The conversation that both continue."""
    chosen: str
    """The preferred completion."""
    rejected: str
    """The other completion, which is different."""
    place: str
    """File and line, for error messages."""


def read_pairs(path: Path) -> Iterator[PreferencePair]:
    """Yield the pairs of a file of rows, in order.

    Raises ValueError with file and line if a row is not a pair, and as `rows_of`.
    """
    for row in rows_of(path):
        try:
            messages, chosen, rejected = _parse(row.fields)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
        yield PreferencePair(messages=messages, chosen=chosen, rejected=rejected, place=row.place)


def _parse(data: Mapping[str, Any]) -> tuple[tuple[Message, ...], str, str]:
    if missing := [key for key in _KEYS if data.get(key) is None]:
        raise ValueError(
            f"it has {', '.join(sorted(data)[:5]) or 'no keys'}, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; it should have prompt, chosen and rejected"
        )
    chosen, rejected = (_turns(data[key], key) for key in _KEYS)
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(
            "chosen and rejected have no common prompt; they should be equal up to the assistant's last turn"
        )
    messages = _prompt(chosen[:-1], data.get("prompt"))
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal; they should be two different completions of the prompt")
    return messages, chosen[-1].content, rejected[-1].content


def _turns(value: object, key: str) -> tuple[Message, ...]:
    """Return the turns of a completion, or of the conversation that it ends. A text is one turn."""
    if isinstance(value, str) and not is_turns(json_in(value)):
        return (Message(role="assistant", content=text_of(value, key, _ANSWER)),)
    turns = turns_of(value, f"ends with {_ANSWER}", key)
    if turns[-1].role != "assistant":
        raise ValueError(f"{key} ends with the {turns[-1].role}'s turn; it should end with {_ANSWER}")
    if len(turns) > 1 and turns[0].role == "assistant":
        raise ValueError(f"{key} has {len(turns)} turns after the prompt; it should have one, {_ANSWER}")
    return turns


def _prompt(before: tuple[Message, ...], prompt: object) -> tuple[Message, ...]:
    """Return the prompt: the turns before the completions, or if there are none, the column `prompt`.

    Some data sets have both.
    """
    if before and prompt is None:
        return before
    turns = parse_conversation(prompt, "prompt")
    if turns[-1].role == "assistant":
        raise ValueError("prompt ends with the assistant's turn; it should end with what is answered")
    if before and [turn.content.strip() for turn in before[-len(turns) :]] != [turn.content.strip() for turn in turns]:
        raise ValueError(
            "chosen and rejected are whole conversations that do not begin with prompt; leave out prompt, or all but "
            "their last turns"
        )
    return before or turns
