"""Evaluation of a checkpoint: prepares the cells, computes missing answers and writes the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from actors.checkpoints.selection import find_position
from deploy.errors import UserError, os_errors, user_errors
from deploy.offline.evaluation.cells import Cell, cells_of
from deploy.offline.evaluation.metrics import compute_metrics
from deploy.offline.evaluation.options import EvaluationOptions
from deploy.offline.evaluation.problems import batches_of, problems_of
from deploy.offline.item import Batch
from deploy.offline.policy import read_tokenizer
from deploy.offline.pool import PoolSettings, answer_batches
from deploy.offline.record import RecordWriter
from deploy.offline.worker import WorkerConfig
from deploy.recipe.recipe import Recipe
from deploy.requests.families import AnyConfig, read_config
from deploy.runs.checkpoints import read_recipe
from deploy.runs.references import find_checkpoint_of, run_of
from learner.model.storage.fingerprint import fingerprint
from learner.model.storage.throughput import ReportProgress
from rollout.config import EngineConfig

RESULTS = "results.json"
_EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Checkpoint under evaluation."""

    name: str
    """`RUN-CHECKPOINT`, or the name of its directory."""
    directory: Path
    """Directory of the checkpoint."""
    config: AnyConfig
    """Model config."""
    run: Recipe | None
    """Recipe of its run; None if it belongs to no run."""
    facts: dict[str, Any]
    """Identity of the checkpoint, as JSON: path, fingerprint and policy version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSettings:
    """Compute settings. They change the answers only through rounding of the logits."""

    num_slots: int | None
    """Completions that a worker denoises at a time; None: as in the run's samplers."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of the weights."""
    pool: PoolSettings
    """Workers and device."""

    def engine(self, run: Recipe | None) -> EngineConfig:
        """Return the engine config of each worker."""
        own = EngineConfig() if run is None else run.rollout.engine
        return EngineConfig(num_slots=self.num_slots or own.num_slots, dtype=self.dtype)

    def batch_size(self, run: Recipe | None) -> int:
        """Return the completions per batch. The run's own size makes results bit-identical to the run's evaluations."""
        return self.engine(run).num_slots if run is None or self.num_slots else run.rollout.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCell:
    """Cell with its batches and its record."""

    cell: Cell
    batches: Sequence[Batch]
    record: RecordWriter


def find_subject(reference: str, runs_dir: Path, say: ReportProgress | None = None) -> Subject:
    """Find the named checkpoint, or the newest one of the named run; `say` receives progress messages.

    Raises UserError if there is none or it cannot be read.
    """
    with user_errors(ValueError), os_errors(f"cannot read the checkpoint {reference}"):
        # Resolved, since a link may point elsewhere later.
        directory = find_checkpoint_of(reference, runs_dir, say).resolve()
        config = read_config(directory)
        position = find_position(directory)
        facts = {"path": str(directory), "fingerprint": fingerprint(directory)}
    run_dir, is_fetched = run_of(directory), not Path(reference).exists()
    # The directory name in the hub's cache is only a revision.
    own_name = reference.replace("/", "--") if is_fetched else directory.name
    return Subject(
        name=own_name if run_dir is None else _name_of(run_dir, directory),
        directory=directory,
        config=config,
        run=None if run_dir is None else read_recipe(run_dir),
        facts=facts | ({} if position is None else {"policy_version": position.policy_version}),
    )


def default_out(subject: Subject, runs_dir: Path) -> Path:
    """Return the default output directory for a checkpoint."""
    return runs_dir / _EVALUATIONS / subject.name


def default_out_of(run_dir: Path, checkpoint: Path) -> Path:
    """Return the default output directory for a checkpoint of a run."""
    return run_dir.parent / _EVALUATIONS / _name_of(run_dir, checkpoint)


def _name_of(run_dir: Path, checkpoint: Path) -> str:
    return f"{run_dir.name}-{checkpoint.name}"


def prepare(
    subject: Subject,
    options: EvaluationOptions,
    compute: ComputeSettings,
    out: Path,
    on_warning: Callable[[str], object],
) -> list[PreparedCell]:
    """Prepare the cells with their existing records; `on_warning` receives warnings about the data.

    Raises UserError, before any sampling, if the options or the data are invalid.
    """
    tokenizer = read_tokenizer(subject.directory)
    if tokenizer is None:
        raise UserError(f"{subject.directory} has no tokenizer; problems are texts, and need one")
    cells = cells_of(options, subject.run, subject.config)
    size = compute.batch_size(subject.run)
    # All cells of a task share its problems.
    problems = {name: problems_of(cell, on_warning) for name, cell in {cell.task.name: cell for cell in cells}.items()}
    usual = None if subject.run is None else subject.run.rollout.max_prompt_tokens
    batches = [
        batches_of(cell, problems[cell.task.name], tokenizer, size, subject.config, usual=usual) for cell in cells
    ]
    prepared = []
    for cell, some in zip(cells, batches, strict=True):
        sizes = [len(batch.items) for batch in some]
        facts = {"checkpoint": subject.facts, **cell.facts(), "dtype": compute.dtype, "batch_size": sizes[0]}
        record = RecordWriter(out / f"{cell.name}.jsonl", facts, sizes)
        prepared.append(PreparedCell(cell=cell, batches=some, record=record))
    return prepared


def run_missing(
    subject: Subject,
    prepared: Sequence[PreparedCell],
    compute: ComputeSettings,
    after_each: Callable[[PreparedCell], object],
) -> None:
    """Answer the missing batches. Raises as `pool.answer_batches`, and UserError if the record cannot be written."""
    # Batches are renumbered across cells, so that the index in a worker's answer is unique.
    waiting = [
        (one, batch) for one in prepared for batch in one.batches if batch.index not in one.record.recorded.batches
    ]
    if not waiting:
        return
    config = WorkerConfig(checkpoint=subject.directory, engine=compute.engine(subject.run))
    numbered = [replace(batch, index=number) for number, (_, batch) in enumerate(waiting)]
    for done in answer_batches(config, compute.pool, numbered):
        one, batch = waiting[done.index]
        one.record.add(replace(done, index=batch.index, completions=()))
        after_each(one)


def write_results(subject: Subject, prepared: Sequence[PreparedCell], out: Path) -> dict[str, Any]:
    """Write the results next to the answers, and return them. Raises UserError if that fails."""
    cells = [
        {
            "task": one.cell.task.name,
            "protocol": one.cell.protocol,
            "gen_length": one.cell.params.gen_length,
            "schedule": one.cell.params.schedule_name,
            "temperature": one.cell.temperature,
            **compute_metrics(one.record.recorded),
            "answers": one.record.path.name,
        }
        for one in prepared
    ]
    found = {"checkpoint": {"name": subject.name, **subject.facts}, "cells": cells}
    with os_errors(f"cannot write {out / RESULTS}"):
        (out / RESULTS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
