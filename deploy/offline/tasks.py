"""Tasks by name: their configs with overrides, and the descriptions of `d1 tasks`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.errors import UserError, user_errors
from deploy.recipe.overrides import parse_override, set_key
from deploy.recipe.validation_errors import first_problem
from rewards import Split, Task, TaskConfig, make_task
from rewards.data.dataset import DataConfig, DataSources
from rewards.tasks.registry import task_names

CUSTOM_TASK = "jsonl"
"""Task without built-in problems: its fields name the data files."""


class _TaskSection(BaseModel):
    """The `task` section of a recipe alone, so that its error messages match those of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: TaskConfig


def task_config(name: str, overrides: Sequence[str], given: Mapping[str, object] | None = None) -> TaskConfig:
    """Build the config of a task. Overrides `key=value` take precedence over the `given` fields.

    Raises UserError, in one sentence, if the task or a field does not exist, or a value is invalid.
    """
    if name not in task_names():
        raise UserError(f"there is no task {name}; the tasks are {', '.join(task_names())}")
    fields: dict[str, object] = dict(given or {})
    for text in overrides:
        set_key(fields, *parse_override(text))
    try:
        return _TaskSection.model_validate({"task": fields | {"name": name}}).task
    except ValidationError as error:
        problem, _ = first_problem(error, _TaskSection.model_json_schema())
        raise UserError(problem.sentence.replace("task.", "")) from error


def open_task(config: TaskConfig) -> Task:
    """Create the task of a config. Raises UserError if it cannot run on this machine."""
    with user_errors(ValueError):
        return make_task(config)


def describe_task(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Describe a task: its sizes, warnings about its data, and an example with its answer."""
    is_bare = name == CUSTOM_TASK and not overrides
    config = task_config(name, ["grader=exact", "train_data=YOURS.jsonl"] if is_bare else overrides)
    task = open_task(config)
    splits = [split for split in Split if split is not Split.VALIDATION or config.validation_fraction]
    sizes = {split.value: "your file's" if is_bare else _size(task, config, split) for split in splits}
    example = task.example()
    return {
        "name": name,
        "about": (inspect.getdoc(type(task)) or "").partition("\n")[0],
        "sizes": sizes,
        "remarks": task.warnings(),
        "prompt": "\n".join(message.content for message in example.messages),
        "answer": example.answer,
        "demonstration": example.reference_completion,
    }


def _size(task: Task, config: TaskConfig, split: Split) -> str:
    try:
        size = task.size(split)
    except ValueError as error:
        if isinstance(config, DataSources) and (config.train_data or config.heldout_data):
            raise UserError(str(error).replace("task.", "")) from error
        # The task is listed even if its dataset is unreachable.
        return str(error)
    if size is None:
        return "cut from the hub's" if isinstance(config, DataConfig) else "generated"
    return f"{size:,}"
