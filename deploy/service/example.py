"""What a newcomer could ask a policy, for the curl line that is printed and for the page: problems of its own task, or
what its model card shows.
"""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from actors.run_log import CHECKPOINTS, RECIPE
from deploy.errors import UserError
from deploy.recipe.yaml_text import parse_yaml
from deploy.runs.checkpoints import read_recipe
from deploy.service.api.replies import RunProblems
from rewards import Split, make_task
from rewards.problem import Message, chat

# The shortest of so many is shown: a problem of some tasks fills a page.
_NUM_PROBLEMS = 8
_OF_ANY_POLICY = "What is 2 + 3?"
_CARD = "README.md"
_HEAD = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_MOST_CHARS = 4000


def example_request(directory: Path) -> tuple[str, str]:
    """The path of the service, and a body as a shell takes it, for a run's policy or a checkpoint's."""
    # ASCII: a task's text could steer a terminal.
    return "/v1/chat/completions", shlex.quote(json.dumps(_body(directory)))


class _Turn(BaseModel):
    role: str
    content: Annotated[str, Field(max_length=_MOST_CHARS)]


class _Example(BaseModel):
    text: Annotated[str, Field(max_length=_MOST_CHARS)] = ""
    messages: list[_Turn] = []


class _Card(BaseModel):
    """What is read of a model card; it has more."""

    widget: list[_Example] = []


class Examples:
    """What the policy of a run or of a checkpoint could be asked on the page. Threads may call it at the same time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.problems = cache(self._read)
        """Its task, if it has one, and prompts of a single turn. The first time this reads the task's data."""

    def _read(self) -> RunProblems:
        task, conversations = _examples(self._directory)
        turns = [turns[0] for turns in conversations if len(turns) == 1]
        return RunProblems(task=task, prompts=[turn.content for turn in turns if turn.role == "user"])


def _examples(directory: Path) -> tuple[str | None, list[tuple[Message, ...]]]:
    """The task of a run, or of a checkpoint's, and some of its held-out problems; without a run what the model card
    shows. None where there is neither, or a dataset is not on this machine: a service that answers does not end for
    that."""
    directory = directory.resolve()
    run_dir = directory.parent.parent if directory.parent.name == CHECKPOINTS else directory
    name = None
    with suppress(UserError, ValueError, OSError):
        if not (run_dir / RECIPE).is_file():
            return None, list(_of_card(directory / _CARD))
        recipe = read_recipe(run_dir)
        name = recipe.task.name
        count = min(_NUM_PROBLEMS, recipe.evaluation.num_problems)
        problems = make_task(recipe.task).problems(Split.HELDOUT, count, seed=0)
        return name, [problem.messages for problem in problems]
    return name, []


def _of_card(path: Path) -> list[tuple[Message, ...]]:
    """The examples of a model card, where the hub has them too: `widget` in the YAML at its head, each with `messages`
    or a `text`. Raises OSError and ValueError where there is no such card."""
    head = _HEAD.match(path.read_text(encoding="utf-8"))
    card = _Card.model_validate(parse_yaml(head[1]) if head else {})
    found = []
    for example in card.widget[:_NUM_PROBLEMS]:
        turns = example.messages or [_Turn(role="user", content=example.text)]
        found.append(tuple(Message(role=turn.role, content=turn.content) for turn in turns))
    return found


def _body(directory: Path) -> dict[str, Any]:
    _, examples = _examples(directory)
    if not examples:
        return {"messages": [{"role": "user", "content": _OF_ANY_POLICY}]}
    return {"messages": chat(min(examples, key=lambda turns: sum(len(message.content) for message in turns)))}
