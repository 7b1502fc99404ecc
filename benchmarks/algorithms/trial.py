"""Trial of one algorithm (a row of the table) on one task and seed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from actors.spec import sampler_facts
from benchmarks.algorithms.local_run import LocalControl, LocalPolicy, LocalRun, Trained, make_sft_checkpoint
from benchmarks.algorithms.report import Budget, Result
from benchmarks.algorithms.teacher import make_teacher, teacher_of
from deploy.recipe.overrides import load_recipe, parse_override, set_key
from deploy.recipe.recipe import Recipe
from learner.algorithms import ALGORITHMS
from learner.config import LearnerConfig
from rewards import RewardConfig
from rollout.config import RolloutConfig
from rollout.request import SamplingParams, Schedule
from rollout.schedule_config import ScheduleConfig

RECIPE_ROW = "recipe"
"""Name of the row that uses the recipe's own method."""
CONTROL_ROW = "control"
"""Name of the row that continues SFT instead."""
_FORK = ScheduleConfig(schedule=Schedule.LEFT_TO_RIGHT, threshold=0.8)
_NOT_OF_A_METHOD = ("micro_batch_tokens", "betas", "weight_decay", "max_grad_norm")
_WARMUP_ROUNDS, _TREE_ROUNDS, _LAST = 10, 100, 10
_LEARNER = "learner."


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Specification of a trial."""

    task: str
    recipe: str
    """Path of the recipe."""
    row: str
    seed: int
    out: str
    """Folder of the checkpoints."""
    rate: float = 1.0
    """Factor of the learning rate."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe's fields; those of `learner` change the row's method."""


def begin() -> None:
    """Initialise a pool process. It is not in `__main__`, which a spawned process cannot import."""
    _end_with_parent()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """Make this process, a worker of a pool, end when its parent dies.

    A parent that is killed does not end its workers, which would wait for work and hold memory forever.
    """
    threading.Thread(target=_wait_for_parent, name="d1-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def start(trial: Trial) -> str:
    """Make and evaluate the common checkpoint of the trial's task and seed. Returns its scores as JSON."""
    base = base_recipe(trial)
    checkpoint, path = make_sft_checkpoint(base), _before(base)
    if not path.is_file():
        path.write_text(json.dumps(_scores(LocalRun(base, checkpoint), _schedules(base)), indent=1) + "\n")
    return path.read_text()


def try_row(trial: Trial, budget: Budget) -> Result:
    """Train until both budgets are spent, evaluating as each one is reached."""
    base = base_recipe(trial)
    schedules, checkpoint = _schedules(base), make_sft_checkpoint(base)
    run: LocalRun | LocalControl
    if trial.row == CONTROL_ROW:
        run = LocalControl(base, checkpoint, budget.cpu_s, trial.rate)
        lr, num_updates, group_size = trial.rate * base.sft.lr, 1, 1
    else:
        if trial.row == "opdlm":
            make_teacher(base)
        recipe = recipe_of(trial, base, budget)
        run, learner = LocalRun(recipe, checkpoint), recipe.learner
        lr, num_updates, group_size = learner.lr, _steps_per_round(learner), learner.group_size
    at_completions: dict[str, Any] | None = None
    at_seconds: dict[str, Any] | None = None
    failure, rounds = None, []
    try:
        for trained in run.rounds():
            rounds.append(trained)
            if at_completions is None and trained.num_completions >= budget.num_completions:
                at_completions = _scores(run, schedules[:1])
            if at_seconds is None and trained.cpu_s >= budget.cpu_s:
                at_seconds = _scores(run, schedules)
            if at_completions is not None and at_seconds is not None:
                break
    except FloatingPointError as error:
        failure = str(error)
    return Result(
        task=trial.task,
        row=trial.row,
        seed=trial.seed,
        rate=trial.rate,
        lr=lr,
        num_updates=num_updates,
        group_size=group_size,
        num_rounds=len(rounds),
        cpu_s=rounds[-1].cpu_s if rounds else 0.0,
        before=json.loads(_before(base).read_text()),
        at_completions=at_completions,
        at_seconds=at_seconds,
        metrics=_means(rounds[-_LAST:]),
        gap=run.likelihood_gap() if rounds else None,
        failure=failure,
    )


def base_recipe(trial: Trial) -> Recipe:
    """Return the recipe of the trial's task, with its seed, before the row's changes to the learner."""
    name = f"{trial.task}-{trial.seed}"
    others = [text for text in trial.overrides if not text.startswith(_LEARNER)]
    words = [f"runs_dir={trial.out}", f"name={name}", f"seed={trial.seed}", *others]
    return load_recipe(Path(trial.recipe), words)


def _before(base: Recipe) -> Path:
    return base.run_dir / "before.json"


def _schedules(base: Recipe) -> tuple[SamplingParams, ...]:
    """Return the recipe's evaluation schedules, which apply to all rows however they sample."""
    return base.evaluation.params(base.rollout.sampling)


def recipe_of(trial: Trial, base: Recipe, budget: Budget) -> Recipe:
    """Return the recipe with the row's method and the budget's round size."""
    settings = base.learner.model_dump(exclude={"num_workers", "max_staleness"})
    if trial.row != RECIPE_ROW:
        settings = {name: settings[name] for name in _NOT_OF_A_METHOD} | {"algorithm": trial.row}
    if trial.row in ("egspo", "egspo-sa"):
        # Each update takes other steps of a completion, and none may be left without.
        own, num_steps = ALGORITHMS[trial.row], sampler_facts(base.rollout.sampling).max_denoise_steps
        settings["inner_updates"] = min(own["inner_updates"], -(-num_steps // own["estimator"]["num_sampled"]))
    settings |= {"num_workers": 1, "num_rounds": 1, "final_lr_fraction": 1.0}
    settings["num_warmup_rounds"] = min(_WARMUP_ROUNDS, base.learner.num_warmup_rounds)
    if trial.row == "opdlm":
        settings["objective"] = {"teacher": teacher_of(base)}
    if trial.row == "d-treerpo":
        # Its consistency loss grows over the rounds.
        settings["num_rounds"] = _TREE_ROUNDS
    for key, value in map(parse_override, trial.overrides):
        if key.startswith(_LEARNER):
            set_key(settings, key.removeprefix(_LEARNER), value)
    learner = LearnerConfig.model_validate(settings)
    sizes = {
        "groups_per_round": max(1, round(budget.of_round / learner.group_size)),
        "lr": trial.rate * base.learner.lr * (_steps_per_round(base.learner) / _steps_per_round(learner)) ** 0.5,
    }
    learner = LearnerConfig.model_validate(settings | sizes)
    changes: dict[str, Any] = {"learner": learner, "rollout": _rollout_of(trial.row, base.rollout)}
    # The caller passes the schedules: the recipe's may be invalid for a row that samples differently.
    changes["evaluation"] = base.evaluation.model_copy(update={"schedules": None})
    if trial.row == "lightningrl":
        changes["reward"] = RewardConfig.model_validate({"terms": {"speed": {"kind": "speed", "weight": 0.02}}})
    return base.model_copy(update=changes)


def _steps_per_round(learner: LearnerConfig) -> int:
    return learner.inner_updates * learner.num_minibatches


def _rollout_of(row: str, rollout: RolloutConfig) -> RolloutConfig:
    """Choose the sampling of a row: its paper's, if it cannot learn from the recipe's schedule."""
    sampling = rollout.sampling
    if row == "justgrpo":
        sampling = sampling.model_copy(update={"block_length": 1, "num_denoise_steps": sampling.gen_length})
    elif row == "forkgrpo":
        sampling = _FORK.of(sampling)
    elif row == "lightningrl":
        sampling = ScheduleConfig(threshold=0.9).of(sampling)
    elif row == "d-opsd":
        # Its teacher looks at later blocks, and the recipes have one. The last block is not scored, and each update
        # needs a step of the others.
        length = 6 if sampling.gen_length % 6 == 0 else 2
        num_blocks = sampling.gen_length // length
        num_steps = num_blocks * math.ceil(ALGORITHMS[row]["inner_updates"] / (num_blocks - 1))
        sampling = sampling.model_copy(update={"block_length": length, "num_denoise_steps": num_steps})
    elif row == "d-treerpo":
        # Two levels of equally many steps.
        num_steps = sampling.num_denoise_steps
        sampling = sampling.model_copy(update={"num_denoise_steps": num_steps + num_steps % 2})
    else:
        return rollout
    return rollout.model_copy(update={"sampling": sampling, "schedules": None})


def _scores(run: LocalPolicy, schedules: Sequence[SamplingParams]) -> dict[str, Any]:
    return {
        name: {"num_correct": score.num_correct, "num_problems": score.num_problems, "mean_steps": round(steps, 2)}
        for name, (score, steps) in run.evaluate(schedules).items()
    }


def _means(rounds: Sequence[Trained]) -> dict[str, float]:
    """Average the learner's metrics over some rounds."""
    names = sorted({name for trained in rounds for name in trained.metrics})
    values = {name: [trained.metrics[name] for trained in rounds if name in trained.metrics] for name in names}
    return {name: sum(some) / len(some) for name, some in values.items()}
