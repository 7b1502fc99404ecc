"""Example prompts for the curl line and the page: held-out problems of the run's task, or those of the model card."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path

from actors.run_log import CHECKPOINTS, RECIPE
from deploy.errors import UserError
from deploy.recipe.yaml_text import parse_yaml
from deploy.runs.checkpoints import read_recipe
from rewards import Split, make_task
from rewards.data.conversation import parse_conversation
from rewards.problem import Message, chat

# The curl line shows the shortest of these: a problem of some tasks fills a page.
_NUM_PROBLEMS = 8
_OF_ANY_POLICY = "What is 2 + 3?"
_CARD = "README.md"
_HEAD = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_MOST_CHARS = 4000


@cache
def example_prompts(directory: Path) -> tuple[str | None, list[str]]:
    """Return the name of the run's task, None without a run, and single-turn example prompts. They are read once."""
    task, conversations = _examples(directory)
    turns = [turns[0] for turns in conversations if len(turns) == 1]
    return task, [turn.content for turn in turns if turn.role == "user"]


def _examples(directory: Path) -> tuple[str | None, list[tuple[Message, ...]]]:
    """Return the name of the run's task and some held-out problems; without a run, the model card's examples.

    Returns no examples if neither exists or the dataset is not on this machine: the service works without them.
    """
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
    """Return the examples under `widget` in a model card's YAML metadata, each with `messages` or a `text`.

    Longer ones are left out. Raises OSError or ValueError if there is no valid card.
    """
    head = _HEAD.match(path.read_text(encoding="utf-8"))
    card = parse_yaml(head[1]) if head else {}
    examples = card.get("widget", []) if isinstance(card, dict) else []
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise ValueError(f"{path}: widget should be a list of examples")
    found = [parse_conversation(one.get("messages") or one.get("text"), "widget") for one in examples[:_NUM_PROBLEMS]]
    return [turns for turns in found if sum(len(turn.content) for turn in turns) <= _MOST_CHARS]


def example_request(directory: Path) -> tuple[str, str]:
    """Return the path of an example request and its shell-quoted JSON body, for a run or a checkpoint."""
    _, examples = _examples(directory)
    messages = [{"role": "user", "content": _OF_ANY_POLICY}]
    if examples:
        messages = chat(min(examples, key=lambda turns: sum(len(message.content) for message in turns)))
    # ASCII only: a task's text could contain terminal escape sequences.
    return "/v1/chat/completions", shlex.quote(json.dumps({"messages": messages}))
