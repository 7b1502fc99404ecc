"""Results of `d1 eval` on a run's checkpoints, at lengths and schedules that the run itself skips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.run_log import CHECKPOINTS
from deploy.evaluation.evaluate import default_out_of
from deploy.evaluation.measures import measures
from deploy.evaluation.record import Recorded, fingerprint, records_in
from rollout.request import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A cell of an evaluation: a checkpoint on a task, at one length and schedule."""

    checkpoint: str
    """Its name in the run: `sft`, `rl-000300`."""
    asked: str
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


def evaluated(run_dir: Path) -> list[Evaluated]:
    """Read the complete cells of a run's checkpoints from the default output directory of `d1 eval`.

    Checkpoints count only with the weights that were evaluated: an earlier run may have had the same name.
    """
    found = [_evaluated(cell) for path in sorted((run_dir / CHECKPOINTS).glob("*")) for cell in _cells(run_dir, path)]
    return sorted(found, key=lambda one: (one.asked, one.gen_length, one.mean_forwards))


def front(cells: Sequence[Evaluated]) -> Iterator[Evaluated]:
    """Yield the Pareto front of accuracy and compute, by ascending forwards: no other cell is as cheap and better."""
    best = -1.0
    for cell in sorted(cells, key=lambda one: (one.mean_forwards, -one.accuracy)):
        if cell.accuracy > best:
            best = cell.accuracy
            yield cell


def _cells(run_dir: Path, checkpoint: Path) -> list[Recorded]:
    cells = [cell for cell in records_in(default_out_of(run_dir, checkpoint)).values() if cell.is_whole]
    with suppress(OSError, ValueError):
        # Checkpoints without evaluations need no fingerprint.
        now = fingerprint(checkpoint) if cells else None
        return [cell for cell in cells if cell.facts["checkpoint"]["fingerprint"] == now]
    return []


def _evaluated(cell: Recorded) -> Evaluated:
    facts, params, found = cell.facts, SamplingParams.model_validate(cell.facts["params"]), measures(cell)
    asked = [facts["task"]["name"]]
    if facts["protocol"] != "fixed":
        asked.append(f"protocol {facts['protocol']}")
    if params.temperature:
        asked.append(f"{facts['num_samples']} samples at temperature {params.temperature:g}")
    if facts["dtype"] != "float32":
        asked.append(facts["dtype"])
    return Evaluated(
        checkpoint=Path(facts["checkpoint"]["path"]).name,
        asked=", ".join(asked),
        gen_length=params.gen_length,
        schedule=params.schedule_name,
        mean_forwards=found["mean_forwards"],
        accuracy=found["accuracy"],
        interval=tuple(found["accuracy_interval"]),
        is_adaptive=not params.has_even_shares,
    )
