"""Prompts of a task or a file, encoded for an autoregressive model whose responses become training data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import UserError, os_errors, user_errors
from rewards import Message, Split, TaskConfig, make_task
from rewards.data.prompt_file import read_prompts
from rewards.problem import chat
from rewards.tasks.registry import task_names

if TYPE_CHECKING:
    from learner.model.autoregressive.source import AutoregressiveCheckpoint

Conversation = tuple[Message, ...]
"""A prompt: turns, of which the last is not the assistant's."""
_SORTED = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """An encoded prompt."""

    index: int
    """Its index among all prompts."""
    ids: tuple[int, ...]
    """Its tokens, up to where the answer begins."""


@user_errors(ValueError)
def task_prompts(config: TaskConfig, count: int) -> list[Conversation]:
    """Return the prompts of a task's first `count` training problems, as the policy sees them.

    Raises UserError if it has fewer, or its data is not available.
    """
    return [problem.messages for problem in make_task(config).problems(Split.TRAIN, count, seed=0)]


def file_prompts(path: Path) -> list[Conversation]:
    """Return the prompts of a file, as `read_prompts`. Raises UserError if it cannot be read or has no prompts."""
    try:
        with os_errors(f"cannot read {path}"):
            return read_prompts(path)
    except ValueError as error:
        if not path.exists() and not path.suffix:
            raise UserError(f"there is no task and no file {path}; the tasks are {', '.join(task_names())}") from error
        raise UserError(str(error)) from error


def encode_prompts(
    source: AutoregressiveCheckpoint, tokenizer: Any, prompts: Sequence[Conversation], max_new_tokens: int
) -> list[EncodedPrompt]:
    """Encode the prompts that leave room for a response, sorted by length within pieces of 1,024.

    Sorting within pieces keeps every first part a fair sample of all. Raises ValueError if the model has no chat
    template, or no prompt fits.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"{source.name} has no chat template, so it cannot be prompted; take an instruction-tuned one")
    room = int(source.config()["max_position_embeddings"]) - max_new_tokens
    found = []
    for index, turns in enumerate(prompts):
        ids = _encoded(tokenizer, turns)
        if len(ids) <= room:
            found.append(EncodedPrompt(index=index, ids=tuple(ids)))
    if not found:
        raise ValueError(
            f"no prompt fits into the context of {source.name} with {max_new_tokens} tokens to answer: it leaves "
            f"{room} to the prompt"
        )
    pieces = [found[start : start + _SORTED] for start in range(0, len(found), _SORTED)]
    return [one for piece in pieces for one in sorted(piece, key=lambda one: len(one.ids))]


def _encoded(tokenizer: Any, turns: Conversation) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(chat(turns), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses the prompt {turns[-1].content[:60]!r}: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def batches_of(prompts: Sequence[EncodedPrompt], size: int) -> Iterator[Sequence[EncodedPrompt]]:
    """Split into batches of `size`."""
    return (prompts[start : start + size] for start in range(0, len(prompts), size))
