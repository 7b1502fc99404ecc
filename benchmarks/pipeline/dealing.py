"""Tokens of the learner's busiest rank, with rows dealt by count and by tokens, on lengths of GSM8K.

    python -m benchmarks.pipeline.dealing GSM8K/train.jsonl

A token is taken for four characters. A sampled completion is as long as the problem's answer times a log-normal factor
with sigma 0.35, at most 256 tokens. The mean of 200 draws is printed, and the worst one.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

from learner.parallel.dealing import RowCosts, deal, largest_share

_DRAWS, _CANVAS, _CHARACTERS = 200, 256, 4
Draw = Callable[[random.Random, list[tuple[int, int]]], RowCosts]
"""Draws the costs of a batch from the tokens of questions and answers."""


def _documents(count: int) -> Draw:
    def draw(rng: random.Random, problems: list[tuple[int, int]]) -> RowCosts:
        return RowCosts.of_lengths([question + answer + 1 for question, answer in rng.sample(problems, count)])

    return draw


def _completions(num_groups: int, group_size: int, tokens_per_canvas: int | None) -> Draw:
    """Draw completions with one canvas each, or with one for so many tokens, of which a group shares the first."""

    def draw(rng: random.Random, problems: list[tuple[int, int]]) -> RowCosts:
        own: list[int] = []
        groups: list[int] = []
        shared: list[int] = []
        for group, (question, answer) in enumerate(rng.sample(problems, num_groups)):
            for _ in range(group_size):
                length = min(_CANVAS, max(1, round(answer * rng.lognormvariate(0, 0.35))))
                num_own = 1 if tokens_per_canvas is None else -(-length // tokens_per_canvas) - 1
                own.append(num_own * (question + _CANVAS))
                groups.append(group)
                shared.append(0 if tokens_per_canvas is None else question + _CANVAS)
        return RowCosts(own=own, groups=groups, shared=shared)

    return draw


_BATCHES: dict[str, tuple[Draw, tuple[int, ...]]] = {
    "SFT, 64 documents": (_documents(64), (8,)),
    "16 groups of 6, a canvas each": (_completions(16, 6, None), (8,)),
    "16 groups of 6, a canvas for 16 tokens": (_completions(16, 6, 16), (8,)),
    "64 groups of 16, a canvas for 32 tokens": (_completions(64, 16, 32), (8,)),
    "4 groups of 6, a canvas each": (_completions(4, 6, None), (3, 5)),
    "4 groups of 6, a canvas for 16 tokens": (_completions(4, 6, 16), (3, 5)),
}


def _by_count(num_rows: int, num_ranks: int) -> list[list[int]]:
    each = -(-num_rows // num_ranks)
    return [list(range(num_rows))[rank * each : (rank + 1) * each] for rank in range(num_ranks)]


def _shares(draw: Draw, num_ranks: int, problems: list[tuple[int, int]]) -> Iterator[tuple[float, float]]:
    """Yield the busiest rank's tokens relative to an even share of all canvases, by count and by tokens."""
    rng = random.Random(0)
    for _ in range(_DRAWS):
        costs = draw(rng, problems)
        even = costs.of(range(len(costs.own))) / num_ranks
        by_count, by_tokens = _by_count(len(costs.own), num_ranks), deal(costs, num_ranks)
        yield largest_share(by_count, costs) / even, largest_share(by_tokens, costs) / even


def main() -> None:
    """Print a row of a table for each batch and number of ranks."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    problems = [(len(row["question"]) // _CHARACTERS, len(row["answer"]) // _CHARACTERS) for row in rows]
    print("| batch | ranks | by count: mean, worst | by tokens: mean, worst |\n|---|---:|---:|---:|")
    for name, (draw, ranks) in _BATCHES.items():
        for num_ranks in ranks:
            before, after = zip(*_shares(draw, num_ranks, problems), strict=True)
            found = (f"{mean(some):.2f}, {max(some):.2f}" for some in (before, after))
            print(f"| {name} | {num_ranks} | {' | '.join(found)} |")


if __name__ == "__main__":
    main()
