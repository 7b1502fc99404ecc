"""Cost of evaluations during training: blocking, and in the background of the next round.

    python -m benchmarks.pipeline.evaluation [--sampling 0.3] [--learning 0.3 0.6] [--rounds 12] [--out FILE]

It runs the simulation of `benchmarks.pipeline.overlap` on Ray, with an evaluation after every round that takes as long
as the round's sampling. In the background an evaluation is free while samplers would otherwise be idle during training.
The lower limit of a round is the larger of the learner's work and the samplers' work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.spec import RunSpec
from actors.training.run_client import RunClient
from benchmarks.pipeline.overlap import FIRST, simulated_run, spec_of, take_round
from deploy.ray_session import ray_session

_LABEL = "round"


class Way(StrEnum):
    """When the learner collects the result of an evaluation."""

    NONE = "none"
    """There are no evaluations."""
    WAITED = "waited for"
    """Before it requests the next round."""
    BESIDE = "beside"
    """After it has trained on the next round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements of rounds with one evaluation each."""

    sampling_s: float
    """Time to sample a round on all samplers, and equally an evaluation."""
    learning_s: float
    staleness: int
    way: Way
    round_s: float
    """Median duration of a round."""

    @property
    def limit_s(self) -> float:
        """Lower limit of a round's duration."""
        evaluation_s = 0.0 if self.way is Way.NONE else self.sampling_s
        if self.way is Way.WAITED:
            return evaluation_s + self._alone_s
        return max(self._alone_s, self.sampling_s + evaluation_s)

    @property
    def _alone_s(self) -> float:
        phases = self.sampling_s, self.learning_s
        return max(phases) if self.staleness else sum(phases)


def rounds_of(spec: RunSpec, sampling_s: float, learning_s: float, way: Way) -> list[float]:
    """Return the seconds of each counted round, evaluation included."""
    taken = []
    with simulated_run(spec, sampling_s) as client:
        for index in range(spec.learner.num_rounds):
            began = time.perf_counter()
            _round(client, index, learning_s, way)
            taken.append(time.perf_counter() - began)
    return taken[FIRST:]


def _round(client: RunClient, index: int, learning_s: float, way: Way) -> None:
    weights_id = take_round(client, index, learning_s, _LABEL if way is Way.BESIDE else "")
    if way is not Way.NONE:
        # Evaluate the version that sampled the round. If blocking, it takes as long as evaluating the next version.
        client.evaluate(weights_id, _LABEL, index, is_new=True)


def measured(sampling_s: float, learning_s: tuple[float, ...], num_rounds: int) -> Iterator[Row]:
    """Measure each way at staleness 0 and 1."""
    for staleness, learning, way in product((0, 1), learning_s, Way):
        # Use a new run each time: a resumed run skips evaluations that its log already has.
        with tempfile.TemporaryDirectory() as directory:
            rounds = rounds_of(spec_of(Path(directory), num_rounds, staleness), sampling_s, learning, way)
        yield Row(
            sampling_s=sampling_s,
            learning_s=learning,
            staleness=staleness,
            way=way,
            round_s=statistics.median(rounds),
        )


def main() -> None:
    """Run the benchmark, print a table, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sampling", type=float, default=0.3, help="seconds of a round's sampling, and an evaluation's"
    )
    parser.add_argument("--learning", type=float, nargs="+", default=[0.3, 0.6], help="seconds of a round's training")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = Table("staleness", "sampling, s", "learning, s", "evaluation", "a round, s", "limit, s")
    rows = []
    with ray_session(dashboard=False):
        for row in measured(args.sampling, tuple(args.learning), args.rounds):
            rows.append(row)
            phases = f"{row.sampling_s:g}", f"{row.learning_s:g}"
            table.add_row(str(row.staleness), *phases, row.way, f"{row.round_s:.3f}", f"{row.limit_s:g}")
    Console(width=120).print(table)
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) | {"limit_s": row.limit_s} for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
