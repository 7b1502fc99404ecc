"""The table: means over seeds with intervals that say how few seeds there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.reproduce.plan import Evaluation, Step
from deploy.reproduce.table import as_json, as_markdown, interval_of, read_cells
from rollout.score import Score

FACTS = {"title": "d1's table, micro", "about": "Small.", "commit": "abc"}


def _evaluated(out: Path, row: str, seed: int, length: int, num_correct: int) -> Step:
    step = Evaluation(name=f"{row}.{seed}.{length}", row=row, task="sudoku", seed=seed, length=length, words=())
    cell = {
        "num_problems": 100,
        "accuracy": num_correct / 100,
        "accuracy_interval": list(Score(num_correct=num_correct, num_problems=100).interval),
        "items": 0.5,
        "mean_forwards": length / 2,
    }
    path = out / "evaluations" / step.name / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"cells": [cell]}))
    return step


def test_the_interval_over_seeds_is_students() -> None:
    # Mean 0.5, standard deviation 0.1, t = 4.303 at two degrees of freedom: half 4.303 * 0.1 / sqrt(3).
    assert interval_of([0.4, 0.5, 0.6], 600) == pytest.approx((0.5 - 0.24844, 0.5 + 0.24844), abs=1e-5)
    assert interval_of([0.1, 0.9], 600) == (0.0, 1.0)


def test_it_is_nowhere_narrower_than_wilsons_over_problems() -> None:
    wilson = Score(num_correct=0, num_problems=600).interval
    assert interval_of([0.0, 0.0, 0.0], 600) == interval_of([0.0], 600) == wilson
    assert wilson[1] > 0.005


def test_a_row_has_its_mean_its_interval_and_each_seed(tmp_path: Path) -> None:
    steps = [_evaluated(tmp_path, "base", seed, 18, 40 + 10 * seed) for seed in (0, 1, 2)]
    steps.append(_evaluated(tmp_path, "+ SFT", 0, 24, 30))
    steps.append(Evaluation(name="not yet", row="+ SFT", task="sudoku", seed=1, length=24, words=()))
    cells = read_cells(steps, tmp_path)
    text = as_markdown(cells, ["base", "+ SFT", "+ diffu-grpo"], FACTS)
    assert "| base | **50.0** (25.2 to 74.8) [40.0, 50.0, 60.0] |  | 50.0 |  |" in text
    assert "| + SFT |  | **30.0** (21.9 to 39.6) |  | 50.0 |" in text, "of one seed Wilson's"
    assert "diffu-grpo |" not in text.partition("## The paper")[0], "what has no cell has no row"
    assert "| base | 68.7/76.7/78.2 |" in text
    found = json.loads(as_json(cells, FACTS))
    assert found["cells"][0]["seeds"] == {"0": 0.4, "1": 0.5, "2": 0.6}
    assert found["commit"] == "abc"
