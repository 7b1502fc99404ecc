"""Results of `d1 eval` on a run's checkpoints, at lengths and schedules that the run itself skips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.run_log import CHECKPOINTS
from deploy.offline.evaluation.evaluate import default_out_of
from deploy.offline.evaluation.metrics import compute_metrics
from deploy.offline.record import CellRecord, records_in
from learner.model.storage.fingerprint import fingerprint
from rollout.request import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalCell:
    """A cell of an evaluation: a checkpoint on a task, at one length and schedule."""

    checkpoint: str
    """Its name in the run: `sft`, `rl-000300`."""
    setting: str
    """The task and all settings that are not the default: cells with equal values share a table."""
    gen_length: int
    """Slots of a completion."""
    schedule: str
    """Name of the denoising schedule."""
    mean_forwards: float
    """Mean forward passes per completion."""
    accuracy: float
    """Share of correct answers."""
    interval: tuple[float, float]
    """95 % confidence interval of the accuracy."""
    is_adaptive: bool
    """Whether the schedule takes as many forwards as it needs."""


def read_eval_cells(run_dir: Path) -> list[EvalCell]:
    """Read the complete cells of a run's checkpoints from the default output directory of `d1 eval`.

    Checkpoints count only with the weights that were evaluated: an earlier run may have had the same name.
    """
    found = [_eval_cell(cell) for path in sorted((run_dir / CHECKPOINTS).glob("*")) for cell in _cells(run_dir, path)]
    return sorted(found, key=lambda one: (one.setting, one.gen_length, one.mean_forwards))


def pareto_front(cells: Sequence[EvalCell]) -> Iterator[EvalCell]:
    """Yield the Pareto front of accuracy and compute, by ascending forwards: no other cell is as cheap and better."""
    best = -1.0
    for cell in sorted(cells, key=lambda one: (one.mean_forwards, -one.accuracy)):
        if cell.accuracy > best:
            best = cell.accuracy
            yield cell


def _cells(run_dir: Path, checkpoint: Path) -> list[CellRecord]:
    cells = [cell for cell in records_in(default_out_of(run_dir, checkpoint)).values() if cell.is_complete]
    with suppress(OSError, ValueError):
        # Checkpoints without evaluations need no fingerprint.
        now = fingerprint(checkpoint) if cells else None
        return [cell for cell in cells if cell.facts["checkpoint"]["fingerprint"] == now]
    return []


def _eval_cell(cell: CellRecord) -> EvalCell:
    facts, params, found = cell.facts, SamplingParams.model_validate(cell.facts["params"]), compute_metrics(cell)
    setting = [facts["task"]["name"]]
    if facts["protocol"] != "fixed":
        setting.append(f"protocol {facts['protocol']}")
    if params.temperature:
        setting.append(f"{facts['num_samples']} samples at temperature {params.temperature:g}")
    if facts["dtype"] != "float32":
        setting.append(facts["dtype"])
    return EvalCell(
        checkpoint=Path(facts["checkpoint"]["path"]).name,
        setting=", ".join(setting),
        gen_length=params.gen_length,
        schedule=params.schedule_name,
        mean_forwards=found["mean_forwards"],
        accuracy=found["accuracy"],
        interval=tuple(found["accuracy_interval"]),
        is_adaptive=not params.has_even_shares,
    )
