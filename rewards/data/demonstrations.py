"""SFT data: conversations with their answers, or plain texts.

A file of rows, as `rewards.data.rows` reads them. Each has one of these, and possibly other columns:

    {"messages": [{"role": "user", "content": ...}, ..., {"role": "assistant", "content": ...}]}
    {"prompt": ..., "completion": ...}      each a text, or a list of turns
    {"question": ..., "thinking_trajectories": [..., ...], "attempt": ...}      s1K (arXiv 2501.19393), as d1 uses it
    {"text": ...}                           a document; the first of the above that a row has wins over it

Or files of plain text (`texts.py`), whose documents are rows of the last kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rewards.data.conversation import parse_conversation, text_of, turns_of
from rewards.data.prompts import D1_FORMAT, format_completion, user_turn
from rewards.data.rows import Row, preview
from rewards.data.sources import rows_of
from rewards.data.texts import text_files, text_rows
from rewards.problem import Message

_S1K_KEYS = ("question", "thinking_trajectories", "attempt")
_KINDS = "messages, prompt and completion, text, or s1K's question, thinking_trajectories and attempt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A conversation and its correct continuation, or a plain text."""

    messages: tuple[Message, ...]
    """The conversation that the policy continues; empty for a plain text."""
    completion: str
    """The correct continuation, or the text."""
    place: str
    """File and line, for error messages."""

    @property
    def is_text(self) -> bool:
        """Whether it is a plain text without a conversation."""
        return not self.messages


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Return the demonstrations of a file of rows, or the documents of text files, in order.

    Raises ValueError with file and line if a row is not a demonstration, and as `rows_of`.
    """
    read = [_read(row) for row in _rows(path) if not _is_blank(row.fields)]
    if not read:
        raise ValueError(f"{path} has no text")
    return read


def _rows(path: Path) -> Iterable[Row]:
    files = text_files(path)
    return chain.from_iterable(map(text_rows, files)) if files else rows_of(path)


def _is_blank(fields: Mapping[str, Any]) -> bool:
    """Return whether it is a paragraph break: text collections split by lines (WikiText) have such rows."""
    return [*fields] == ["text"] and fields["text"] is not None and not str(fields["text"]).strip()


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
    if data.get("text") is not None:
        return (), text_of(data["text"], "text", "the document to train on")
    if "messages" in data:
        return _from_messages(None)
    raise ValueError(f"it has {', '.join(sorted(data)[:5]) or 'no keys'}; it should have {_KINDS}")


def _from_prompt(data: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    turns = parse_conversation(data.get("prompt"), "prompt")
    if turns[-1].role == "assistant":
        raise ValueError("prompt ends with the assistant's turn; what is trained on belongs in completion")
    return turns, _completion(data.get("completion"))


def _completion(value: object) -> str:
    """Return the answer to train on: a text, or the only turn of a list."""
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
            f"thinking_trajectories is {preview(trajectories)}; it should be a list of texts, of which the first counts"
        )
    reasoning = text_of(trajectories[0], "thinking_trajectories[0]", "how it is solved")
    answer = text_of(data.get("attempt"), "attempt", "the answer to train on")
    return user_turn(f"{D1_FORMAT}\n{question}"), format_completion("d1", reasoning=reasoning, answer=answer)
