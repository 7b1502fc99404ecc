"""Prompts of a task or a file, for an autoregressive model whose responses become training data."""

from __future__ import annotations

from pathlib import Path

from deploy.errors import UserError, reason, user_errors
from rewards import Message, Split, TaskConfig, make_task
from rewards.data.conversation import parse_conversation, turns_of
from rewards.data.encoding import decode_text
from rewards.data.prompts import user_turn
from rewards.data.rows import Row
from rewards.data.sources import rows_of
from rewards.tasks.registry import task_names

Conversation = tuple[Message, ...]
"""A prompt: turns, of which the last is not the assistant's."""


@user_errors(ValueError)
def task_prompts(config: TaskConfig, count: int) -> list[Conversation]:
    """Return the prompts of a task's first `count` training problems, as the policy sees them.

    Raises UserError if it has fewer, or its data is not available.
    """
    return [problem.messages for problem in make_task(config).problems(Split.TRAIN, count, seed=0)]


def file_prompts(path: Path) -> list[Conversation]:
    """Return the prompts of a file: `.txt` with one on each line, or rows with `prompt` or `messages`.

    `path` may be anything else that `sft.data` can name. Raises UserError if it cannot be read or has no prompts.
    """
    try:
        found = _lines(path) if path.suffix.lower() == ".txt" else [_prompt(row) for row in rows_of(path)]
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        if not path.exists() and not path.suffix:
            raise UserError(f"there is no task and no file {path}; the tasks are {', '.join(task_names())}") from error
        raise UserError(str(error)) from error
    if not found:
        raise UserError(f"{path} has no prompts; it should have one on each line")
    return found


def _lines(path: Path) -> list[Conversation]:
    try:
        text = decode_text(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error
    return [user_turn(line.strip()) for line in text.splitlines() if line.strip()]


def _prompt(row: Row) -> Conversation:
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
