"""Prompts of a file, which a model answers."""

from __future__ import annotations

from pathlib import Path

from rewards.data.conversation import parse_conversation, turns_of
from rewards.data.encoding import decode_text
from rewards.data.prompts import user_turn
from rewards.data.rows import Row
from rewards.data.sources import rows_of
from rewards.problem import Message


def read_prompts(path: Path) -> list[tuple[Message, ...]]:
    """Return the prompts of a file: `.txt` with one on each line, or rows with `prompt` or `messages`.

    `path` may be anything else that `sft.data` can name. Raises ValueError, with file and line, if it has no prompts.
    """
    found = _lines(path) if path.suffix.lower() == ".txt" else [_prompt(row) for row in rows_of(path)]
    if not found:
        raise ValueError(f"{path} has no prompts; it should have one on each line")
    return found


def _lines(path: Path) -> list[tuple[Message, ...]]:
    try:
        text = decode_text(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error
    return [user_turn(line.strip()) for line in text.splitlines() if line.strip()]


def _prompt(row: Row) -> tuple[Message, ...]:
    """Return a row's prompt. The final answer of a chat file is dropped, because the model's own replaces it."""
    try:
        if row.fields.get("messages") is None:
            if row.fields.get("prompt") is None:
                names = ", ".join(sorted(row.fields)[:5]) or "no keys"
                raise ValueError(f"it has {names}; it should have messages or prompt")
            turns = parse_conversation(row.fields["prompt"], "prompt")
        else:
            turns = turns_of(row.fields["messages"], "says what the model is asked")
        while turns and turns[-1].role == "assistant":
            turns = turns[:-1]
        if not turns:
            raise ValueError("messages has the assistant's turn alone; what it answers should come before it")
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error
    return turns
