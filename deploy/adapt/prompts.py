"""Prompts of a task or a file, for an autoregressive model whose responses become training data."""

from __future__ import annotations

from pathlib import Path

from deploy.errors import UserError, reason, user_errors
from rewards import Message, Split, TaskConfig, make_task
from rewards.data.prompt_file import read_prompts
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
    """Return the prompts of a file, as `read_prompts`. Raises UserError if it cannot be read or has no prompts."""
    try:
        return read_prompts(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        if not path.exists() and not path.suffix:
            raise UserError(f"there is no task and no file {path}; the tasks are {', '.join(task_names())}") from error
        raise UserError(str(error)) from error
