"""Tasks by name, as the command line knows them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.errors import UserError
from deploy.recipe.overrides import parse_override, set_key
from deploy.recipe.refusals import first_refusal
from rewards import Split, Task, TaskConfig, make_task
from rewards.data.dataset import DataConfig, Files
from rewards.tasks.table import task_names

OF_YOUR_OWN = "jsonl"
"""The task that has no problems but those that its fields name."""


class _Chosen(BaseModel):
    """A recipe's `task` section alone, so that sentences about it are those of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: TaskConfig


def task_config(name: str, overrides: Sequence[str], given: Mapping[str, object] | None = None) -> TaskConfig:
    """The config of a task with overrides `key=value` of its fields, or of those that are `given`.

    Raises UserError, in one sentence, for a task or a field that there is not, and for a value that does not fit.
    """
    if name not in task_names():
        raise UserError(f"there is no task {name}; the tasks are {', '.join(task_names())}")
    fields: dict[str, object] = dict(given or {})
    for text in overrides:
        set_key(fields, *parse_override(text))
    try:
        return _Chosen.model_validate({"task": fields | {"name": name}}).task
    except ValidationError as error:
        refusal, _ = first_refusal(error, _Chosen.model_json_schema())
        raise UserError(refusal.sentence.replace("task.", "")) from error


def opened(config: TaskConfig) -> Task:
    """The task of a config. Raises UserError where it cannot work on this machine."""
    try:
        return make_task(config)
    except ValueError as error:
        raise UserError(str(error)) from error


def described(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What there is to know of a task: its sizes, where its problems come from, and an example with its answer."""
    is_bare = name == OF_YOUR_OWN and not overrides
    config = task_config(name, ["grader=exact", "train_data=YOURS.jsonl"] if is_bare else overrides)
    task = opened(config)
    splits = [split for split in Split if split is not Split.VALIDATION or config.validation_fraction]
    sizes = {split.value: "your file's" if is_bare else _size(task, config, split) for split in splits}
    example = task.example()
    return {
        "name": name,
        "about": (inspect.getdoc(type(task)) or "").partition("\n")[0],
        "sizes": sizes,
        "remarks": task.remarks(),
        "prompt": "\n".join(message.content for message in example.messages),
        "answer": example.answer,
        "demonstration": example.demonstration,
    }


def _size(task: Task, config: TaskConfig, split: Split) -> str:
    try:
        size = task.size(split)
    except ValueError as error:
        if isinstance(config, Files) and (config.train_data or config.heldout_data):
            raise UserError(str(error).replace("task.", "")) from error
        # A dataset that cannot be reached is no reason to hide the task.
        return str(error)
    if size is None:
        return "cut from the hub's" if isinstance(config, DataConfig) else "generated"
    return f"{size:,}"
