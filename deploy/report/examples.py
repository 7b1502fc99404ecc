"""Example completions of held-out problems before and after RL, with the denoise step of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints.selection import newest_checkpoint, servable
from actors.run_log import CHECKPOINTS
from deploy.offline.evaluation.cells import cells_of
from deploy.offline.evaluation.options import EvaluationOptions
from deploy.offline.evaluation.problems import batches_of, problems_of
from deploy.offline.item import AnyCompletion
from deploy.offline.worker import Worker, WorkerConfig
from deploy.printing import printable
from deploy.recipe.recipe import Recipe
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rollout.request import Completion

_NUM_SHADES = 10
_SPECIAL = "·"


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One slot of a completion."""

    text: str
    """Its text; a dot for a special token, such as end of text."""
    step: int
    """The denoise step that committed it, from 1."""
    shade: int
    """Shade of that step, from 0 (early) to 9 (late)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedCompletion:
    """A graded completion."""

    policy: str
    """Name of the checkpoint that generated it."""
    correct: bool
    """Whether it solves the problem."""
    num_steps: int
    """Number of denoise steps."""
    tokens: Sequence[Token]
    """Its slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportExample:
    """A problem and its completions."""

    prompt: str
    """The prompt as readable text."""
    completions: Sequence[GradedCompletion]
    """Before RL, then after it."""


def make_examples(run_dir: Path, recipe: Recipe, count: int) -> list[ReportExample]:
    """Complete the first held-out problems of a run, not selected by outcome, at the first of its schedules.

    The policies are its SFT checkpoint, or else its initial one, and its newest intact one.
    Raises ValueError or OSError if a checkpoint cannot be read.
    """
    checkpoints = run_dir / CHECKPOINTS
    newest = newest_checkpoint(checkpoints, servable)
    first = next((checkpoints / name for name in ("sft", "initial") if (checkpoints / name).is_dir()), None)
    if newest is None or first is None or count == 0:
        return []
    tokenizer, config = ChatTokenizer(first), load_config(first)
    cell, *_ = cells_of(EvaluationOptions(), recipe, config)
    problems = problems_of(cell, lambda _: None)[:count]
    batches = batches_of(cell, problems, tokenizer, recipe.rollout.batch_size, config)
    by_policy: list[list[GradedCompletion]] = []
    for directory in (first, newest.directory):
        worker = Worker(WorkerConfig(checkpoint=directory))
        answered = [worker.answer(batch) for batch in batches if batch.has_room]
        pairs = [pair for one in answered for pair in zip(one.completions, one.answers, strict=True)]
        by_policy.append(
            [_shown(directory.name, completion, tokenizer, correct=answer.correct) for completion, answer in pairs]
        )
    asked = [item.asked[0] for batch in batches if batch.has_room for item in batch.items]
    return [
        ReportExample(prompt="\n".join(printable(one.content) for one in problem.messages), completions=some)
        for problem, *some in zip(asked, *by_policy, strict=True)
    ]


def _shown(policy: str, completion: AnyCompletion, tokenizer: ChatTokenizer, *, correct: bool) -> GradedCompletion:
    assert isinstance(completion, Completion), "runs train policies with a mask token"
    ids, steps = completion.token_ids.tolist(), completion.step_map.tolist()
    num_steps = max(1, max(steps, default=0) + 1)
    special = tokenizer.special_ids
    tokens = [
        Token(
            text=_SPECIAL if token in special else printable(text),
            step=step + 1,
            shade=min(_NUM_SHADES - 1, max(0, step) * _NUM_SHADES // num_steps),
        )
        for token, text, step in zip(ids, tokenizer.tokens(ids), steps, strict=True)
    ]
    return GradedCompletion(policy=policy, correct=correct, num_steps=num_steps, tokens=tokens)
