"""Demonstrations in a file: conversations with the answer that SFT trains on.

A file of rows, as `rewards.data.rows` reads them; each has one of these, and whatever else it likes:

    {"messages": [{"role": "user", "content": ...}, ..., {"role": "assistant", "content": ...}]}
    {"prompt": ..., "completion": ...}      each a text, or a list of turns
    {"question": ..., "thinking_trajectories": [..., ...], "attempt": ...}      s1K (arXiv 2501.19393), as d1 uses it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.data.conversation import asked, text_of, turns_of
from rewards.data.prompts import D1_FORMAT, demonstration, user_turn
from rewards.data.rows import Row, shown
from rewards.data.sources import rows_of
from rewards.problem import Message

_S1K_KEYS = ("question", "thinking_trajectories", "attempt")
_KINDS = "messages, prompt and completion, or s1K's question, thinking_trajectories and attempt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A conversation and its right continuation."""

    messages: tuple[Message, ...]
    """The conversation that the policy continues."""
    completion: str
    """What it should say."""
    place: str
    """File and line, for sentences about it."""


def read_demonstrations(path: Path) -> list[Demonstration]:
    """The demonstrations of a file of rows, in order.

    Raises ValueError, in one sentence with file and line, for a row that is no demonstration, and as `rows_of`.
    """
    return [_read(row) for row in rows_of(path)]


def _read(row: Row) -> Demonstration:
    try:
        messages, completion = _parse(row.fields)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error
    return Demonstration(messages=messages, completion=completion, place=row.place)


def _parse(data: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    if data.get("messages") is not None:
        return _from_messages(data["messages"])
    if data.get("prompt") is not None or "completion" in data:
        return _from_prompt(data)
    if any(key in data for key in _S1K_KEYS):
        return _from_s1k(data)
    if "messages" in data:
        return _from_messages(None)
    raise ValueError(f"it has {', '.join(sorted(data)[:5]) or 'no keys'}; it should have {_KINDS}")


def _from_prompt(data: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    turns = asked(data.get("prompt"), "prompt")
    if turns[-1].role == "assistant":
        raise ValueError("prompt ends with the assistant's turn; what is trained on belongs in completion")
    return turns, _completion(data.get("completion"))


def _completion(value: object) -> str:
    """The answer to train on: a text, or the one turn of a list."""
    if not isinstance(value, list):
        return text_of(value, "completion", "the answer to train on")
    turns = turns_of(value, "has the assistant's answer", "completion")
    if len(turns) > 1 or turns[0].role != "assistant":
        roles = ", ".join(turn.role for turn in turns)
        raise ValueError(f"completion has the turns {roles}; it should have one, the assistant's answer")
    return turns[0].content


def _from_messages(messages: object) -> tuple[tuple[Message, ...], str]:
    turns = turns_of(messages, "ends with the assistant's answer")
    if turns[-1].role != "assistant":
        raise ValueError(
            f"there is no answer: the last of messages is the {turns[-1].role}'s; "
            "it should be the assistant's, which is what is trained on"
        )
    if len(turns) == 1:
        raise ValueError("messages has the assistant's answer alone; what it answers should come before it")
    return turns[:-1], turns[-1].content


def _from_s1k(data: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    question = text_of(data.get("question"), "question", "what the policy is asked")
    trajectories = data.get("thinking_trajectories")
    if not isinstance(trajectories, Sequence) or isinstance(trajectories, str) or not trajectories:
        raise ValueError(
            f"thinking_trajectories is {shown(trajectories)}; it should be a list of texts, of which the first counts"
        )
    reasoning = text_of(trajectories[0], "thinking_trajectories[0]", "how it is solved")
    answer = text_of(data.get("attempt"), "attempt", "the answer to train on")
    return user_turn(f"{D1_FORMAT}\n{question}"), demonstration("d1", reasoning=reasoning, answer=answer)
