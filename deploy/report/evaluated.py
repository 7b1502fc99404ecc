"""What `d1 eval` found of a run's checkpoints: accuracy at lengths and schedules that the run itself does not ask."""

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
    """A cell of an evaluation: a checkpoint at a task, a length and a schedule."""

    checkpoint: str
    """Its name in the run: `sft`, `rl-000300`."""
    asked: str
    """What was asked of it, as a reader tells tables by: the task, and what is not as usual."""
    gen_length: int
    """Slots of a completion."""
    schedule: str
    """How it was denoised."""
    mean_forwards: float
    """Forwards of a completion."""
    accuracy: float
    """The share of right answers."""
    interval: tuple[float, float]
    """Of it, at 95 %."""
    is_adaptive: bool
    """Whether the schedule takes as many forwards as it needs."""


def evaluated(run_dir: Path) -> list[Evaluated]:
    """The whole cells of a run's checkpoints, in the directory where `d1 eval` keeps them if nothing else is said.

    Only of checkpoints that are still there with the weights that were asked: another run may have had the name.
    """
    found = [_evaluated(cell) for path in sorted((run_dir / CHECKPOINTS).glob("*")) for cell in _cells(run_dir, path)]
    return sorted(found, key=lambda one: (one.asked, one.gen_length, one.mean_forwards))


def front(cells: Sequence[Evaluated]) -> Iterator[Evaluated]:
    """Those that no other beats with as few forwards, by rising forwards: the Pareto front of accuracy and compute."""
    best = -1.0
    for cell in sorted(cells, key=lambda one: (one.mean_forwards, -one.accuracy)):
        if cell.accuracy > best:
            best = cell.accuracy
            yield cell


def _cells(run_dir: Path, checkpoint: Path) -> list[Recorded]:
    cells = [cell for cell in records_in(default_out_of(run_dir, checkpoint)).values() if cell.is_whole]
    with suppress(OSError, ValueError):
        # What is not evaluated is not looked into.
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
        is_adaptive=not params.is_by_shares,
    )
