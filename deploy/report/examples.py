"""Example completions of held-out problems before and after RL, with the denoise step of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.checkpoints.selection import newest_checkpoint, servable
from actors.grader import GraderWorker
from actors.messages import WorkUnit
from actors.plan import RunPlan
from actors.run_log import CHECKPOINTS
from deploy.printing import printable
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.run_directory import make_spec
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rollout.request import Completion
from rollout.sampler import Sampler

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
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        written = {path.name: path for path in (first, newest.directory)}
        return _make_examples(written, recipe.model_copy(update={"runs_dir": run_dir.parent}), count)
    finally:
        torch.set_num_threads(threads)


def _make_examples(checkpoints: Mapping[str, Path], recipe: Recipe, count: int) -> list[ReportExample]:
    directory = next(iter(checkpoints.values()))
    spec = make_spec(recipe, Stages.ALL)
    tokenizer = ChatTokenizer(directory)
    plan = RunPlan(spec, tokenizer)
    grader = GraderWorker(spec.task, spec.reward, directory)
    asked = _head(plan.evaluation_work_units(recipe.evaluated_params[0], load_config(directory)), count)
    by_policy: list[list[GradedCompletion]] = []
    for name, path in checkpoints.items():
        completions = Sampler(load_policy(path), 0).generate(asked.requests)
        _, summary = grader.grade(asked, completions)
        by_policy.append(
            [
                _shown(name, completion, tokenizer, correct=grade.correct)
                for completion, grade in zip(completions, summary.grades, strict=True)
            ]
        )
    return [
        ReportExample(prompt=printable(plan.prompt_text(problem)), completions=some)
        for problem, *some in zip(asked.problems, *by_policy, strict=True)
    ]


def _head(work_units: Sequence[WorkUnit], count: int) -> WorkUnit:
    problems = [problem for work_unit in work_units for problem in work_unit.problems][:count]
    requests = [request for work_unit in work_units for request in work_unit.requests][:count]
    return WorkUnit(
        key=work_units[0].key,
        problems=tuple(problems),
        group_ids=tuple(range(len(problems))),
        requests=tuple(requests),
    )


def _shown(policy: str, completion: Completion, tokenizer: ChatTokenizer, *, correct: bool) -> GradedCompletion:
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
