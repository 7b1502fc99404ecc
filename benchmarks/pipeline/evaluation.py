"""What an evaluation between the rounds costs the learner: waited for, and beside the next round.

    python -m benchmarks.pipeline.evaluation [--sampling 0.3] [--learning 0.3 0.6] [--rounds 12] [--out FILE]

The run of `benchmarks.pipeline.overlap`, simulated on Ray, with an evaluation after every round, as long on all
samplers as a round's sampling. Beside the next round it can cost nothing where the samplers are free while the learner
trains: the limit is the longer of what the learner and what the samplers have to do.
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
    """When the learner hears of an evaluation."""

    NONE = "none"
    """There is none."""
    WAITED = "waited for"
    """Before it asks for the next round."""
    BESIDE = "beside"
    """When it has trained on the next round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Rounds with an evaluation each."""

    sampling_s: float
    """Of a round's work units on all samplers, and of an evaluation's."""
    learning_s: float
    staleness: int
    way: Way
    round_s: float
    """Median."""

    @property
    def limit_s(self) -> float:
        """The least that a round can take."""
        evaluation_s = 0.0 if self.way is Way.NONE else self.sampling_s
        if self.way is Way.WAITED:
            return evaluation_s + self._alone_s
        return max(self._alone_s, self.sampling_s + evaluation_s)

    @property
    def _alone_s(self) -> float:
        phases = self.sampling_s, self.learning_s
        return max(phases) if self.staleness else sum(phases)


def rounds_of(spec: RunSpec, sampling_s: float, learning_s: float, way: Way) -> list[float]:
    """Seconds of each round that counts, with its evaluation."""
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
        # Of the version that the round was sampled from: where it is waited for, as long as that of the next.
        client.evaluate(weights_id, _LABEL, index, is_new=True)


def measured(sampling_s: float, learning_s: tuple[float, ...], num_rounds: int) -> Iterator[Row]:
    """Each way at staleness 0 and 1."""
    for staleness, learning, way in product((0, 1), learning_s, Way):
        # A run of its own: one that goes on does not evaluate again what its log has.
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
    """Measure, print, and write where `--out` says."""
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
