"""What a newcomer could ask a policy: problems of its own task, for the curl line that is printed and for the page."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.run_log import CHECKPOINTS, RECIPE
from deploy.errors import UserError
from deploy.runs.reading import read_recipe
from rewards import Problem, Split, make_task
from rewards.problem import chat

# The shortest of so many is shown: a problem of some tasks fills a page.
_NUM_PROBLEMS = 8
_OF_ANY_POLICY = "What is 2 + 3?"


def example_request(directory: Path) -> tuple[str, str]:
    """The path of the service, and a body as a shell takes it, for a run's policy or a checkpoint's."""
    # ASCII: a task's text could steer a terminal.
    return "/v1/chat/completions", shlex.quote(json.dumps(_body(directory)))


def example_problems(directory: Path) -> tuple[str | None, list[Problem]]:
    """The task of a run, or of a checkpoint's, and some of its held-out problems; none where there is no run, or its
    dataset is not on this machine: a service that answers does not end for that."""
    directory = directory.resolve()
    run_dir = directory.parent.parent if directory.parent.name == CHECKPOINTS else directory
    name = None
    with suppress(UserError, ValueError, OSError):
        if (run_dir / RECIPE).is_file():
            recipe = read_recipe(run_dir)
            name = recipe.task.name
            count = min(_NUM_PROBLEMS, recipe.evaluation.num_problems)
            return name, make_task(recipe.task).problems(Split.HELDOUT, count, seed=0)
    return name, []


def _body(directory: Path) -> dict[str, Any]:
    _, problems = example_problems(directory)
    if not problems:
        return {"messages": [{"role": "user", "content": _OF_ANY_POLICY}]}
    messages = min(problems, key=lambda problem: sum(len(message.content) for message in problem.messages)).messages
    return {"messages": chat(messages)}
