"""An evaluation: what is asked is made ready, what is not answered yet is answered, and what it comes to is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from actors.checkpoints.selection import find_position
from actors.run_log import CHECKPOINTS, RECIPE
from deploy.errors import UserError, reason
from deploy.evaluation.cells import Cell, cells_of
from deploy.evaluation.measures import measures
from deploy.evaluation.pool import Wanted, answers
from deploy.evaluation.problems import Batch, batches_of, problems_of
from deploy.evaluation.record import Record, fingerprint
from deploy.evaluation.schedules import Asked
from deploy.evaluation.worker import Answered, WorkerConfig
from deploy.recipe.recipe import Recipe
from deploy.runs.reading import read_recipe
from deploy.runs.references import find_checkpoint_of
from deploy.sampling.policy import read_tokenizer
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.renoising.config import RenoisingConfig, is_renoising, read_renoising_config
from learner.model.storage.throughput import Say
from rollout.config import EngineConfig

RESULTS = "results.json"
_EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The checkpoint that is evaluated."""

    name: str
    """`RUN-CHECKPOINT`, or the name of its directory."""
    directory: Path
    """Where it is."""
    run: Recipe | None
    """The recipe of its run; None where it is of none."""
    facts: dict[str, Any]
    """What its answers hang on, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Computing:
    """How the answers are computed. None of it changes them, but for the last bits of a logit."""

    num_slots: int | None
    """Completions that a worker denoises at a time; None: as the run's samplers do."""
    dtype: Literal["float32", "bfloat16"]
    """Of the weights."""
    wanted: Wanted
    """By whom."""

    def engine(self, run: Recipe | None) -> EngineConfig:
        """Of each worker."""
        own = EngineConfig() if run is None else run.rollout.engine
        return EngineConfig(num_slots=self.num_slots or own.num_slots, dtype=self.dtype)

    def batch_size(self, run: Recipe | None) -> int:
        """Completions of a batch. A run's own, for its numbers to be those of its evaluations to the last bit."""
        return self.engine(run).num_slots if run is None or self.num_slots else run.rollout.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A cell with its batches and its record."""

    cell: Cell
    batches: Sequence[Batch]
    record: Record

    @property
    def missing(self) -> list[Batch]:
        """What is not answered yet."""
        return [batch for batch in self.batches if batch.index not in self.record.done]


def find_subject(reference: str, runs_dir: Path, say: Say | None = None) -> Subject:
    """The checkpoint that a user names: a run's newest, or one by itself; `say` is told at which rate it is read.

    Raises UserError where there is none or it cannot be read.
    """
    try:
        # A link is a name for today.
        directory = find_checkpoint_of(reference, runs_dir, say).resolve()
        _shape_of(directory)
        position = find_position(directory)
        facts = {"path": str(directory), "fingerprint": fingerprint(directory)}
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {reference}: {reason(error)}") from error
    run_dir, is_fetched = directory.parent.parent, not Path(reference).exists()
    is_of_run = directory.parent.name == CHECKPOINTS and (run_dir / RECIPE).is_file()
    # The hub's cache names a directory by its revision.
    own_name = reference.replace("/", "--") if is_fetched else directory.name
    return Subject(
        name=_name_of(run_dir, directory) if is_of_run else own_name,
        directory=directory,
        run=read_recipe(run_dir) if is_of_run else None,
        facts=facts | ({} if position is None else {"policy_version": position.policy_version}),
    )


def default_out(subject: Subject, runs_dir: Path) -> Path:
    """Where the answers of a checkpoint are kept if nothing else is said."""
    return runs_dir / _EVALUATIONS / subject.name


def default_out_of(run_dir: Path, checkpoint: Path) -> Path:
    """The same of a checkpoint of a run."""
    return run_dir.parent / _EVALUATIONS / _name_of(run_dir, checkpoint)


def _name_of(run_dir: Path, checkpoint: Path) -> str:
    return f"{run_dir.name}-{checkpoint.name}"


def prepare(
    subject: Subject, asked: Asked, computing: Computing, out: Path, tell: Callable[[str], object]
) -> list[Ready]:
    """The cells with what there is of them already; `tell` is given what a user should know of the data.

    Raises UserError, before anything is answered.
    """
    try:
        config = _shape_of(subject.directory)
    except ValueError as error:
        raise UserError(str(error)) from error
    tokenizer = read_tokenizer(subject.directory)
    if tokenizer is None:
        raise UserError(f"{subject.directory} has no tokenizer; problems are texts, and need one")
    cells = cells_of(asked, subject.run, config)
    size = computing.batch_size(subject.run)
    # The cells of one task ask the same problems.
    problems = {name: problems_of(cell, tell) for name, cell in {cell.task.name: cell for cell in cells}.items()}
    usual = None if subject.run is None else subject.run.rollout.max_prompt_tokens
    batches = [batches_of(cell, problems[cell.task.name], tokenizer, size, config, usual=usual) for cell in cells]
    return [_ready(subject, cell, some, computing, out) for cell, some in zip(cells, batches, strict=True)]


def _shape_of(directory: Path) -> TransformerConfig | RenoisingConfig:
    """The config of a checkpoint of any family. Raises ValueError where it is no checkpoint."""
    return read_renoising_config(directory) if is_renoising(directory) else load_config(directory)


def _ready(subject: Subject, cell: Cell, batches: Sequence[Batch], computing: Computing, out: Path) -> Ready:
    sizes = [len(batch.requests) for batch in batches]
    facts = {"checkpoint": subject.facts, **cell.facts(), "dtype": computing.dtype, "batch_size": sizes[0]}
    return Ready(cell=cell, batches=batches, record=Record(out / f"{cell.name}.jsonl", facts, sizes))


def answer_all(
    subject: Subject, ready: Sequence[Ready], computing: Computing, after_each: Callable[[Ready, Answered], object]
) -> None:
    """Answer what is missing, batch by batch. Raises as `pool.answers`, and UserError where the disk takes no more."""
    # Batches are numbered anew: a worker's answer says which of all it was.
    waiting = [(one, batch) for one in ready for batch in one.missing]
    if not waiting:
        return
    config = WorkerConfig(
        checkpoint=subject.directory, engine=computing.engine(subject.run), device="cpu", num_threads=1
    )
    numbered = [replace(batch, index=number) for number, (_, batch) in enumerate(waiting)]
    for done in answers(config, computing.wanted, numbered):
        one, batch = waiting[done.index]
        one.record.add(replace(done, index=batch.index))
        after_each(one, done)


def results(subject: Subject, ready: Sequence[Ready]) -> dict[str, Any]:
    """What it comes to, as JSON."""
    return {
        "checkpoint": {"name": subject.name, **subject.facts},
        "cells": [
            {
                "task": one.cell.task.name,
                "protocol": one.cell.protocol,
                "gen_length": one.cell.params.gen_length,
                "schedule": one.cell.params.schedule_name,
                "temperature": one.cell.temperature,
                **measures(one.record.recorded),
                "answers": one.record.path.name,
            }
            for one in ready
        ],
    }


def write_results(found: dict[str, Any], out: Path) -> None:
    """Write them beside the answers. Raises UserError where the disk takes no more."""
    try:
        (out / RESULTS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out / RESULTS}: {reason(error)}") from error
