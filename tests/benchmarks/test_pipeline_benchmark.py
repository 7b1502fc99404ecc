"""The benchmarks of the pipeline measure what they say."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from actors.spec import RunSpec
from benchmarks.pipeline import coordinator, overlap


def test_simulated_samplers_go_through_every_round() -> None:
    with patch("actors.coordination.coordinator.RunGauges", coordinator.NoGauges):
        row = asyncio.run(coordinator.measured(num_samplers=5, portion_s=0.02, num_rounds=2))
    # Four portions for each sampler, one after the other.
    assert row.round_s > 4 * 0.02
    assert 0 < row.at_work <= 1
    assert row.at_work == pytest.approx(4 * 0.02 / row.round_s, rel=0.5)
    assert row.groups_per_s == pytest.approx(5 * 4 * 2 / row.round_s)
    assert 0 < row.dispatch_s[0] <= row.dispatch_s[1] < row.round_s
    assert row.cpu_of_portion_s > 0


def test_what_is_taken_is_the_share_of_what_could_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(spec: RunSpec, sampling_s: float, learning_s: float) -> tuple[list[float], float]:
        both, longer = sampling_s + learning_s, max(sampling_s, learning_s)
        assert spec.portions_per_round == 4
        return [9.0, both + 0.01 if not spec.learner.max_staleness else longer + 0.05, 0.0], 0.002

    monkeypatch.setattr(overlap, "simulated_rounds", rounds)
    found = list(overlap.simulated([(0.2, 0.4), (0.0, 0.0)], num_rounds=3, repeats=1, tell=str))
    assert [(row.staleness, row.round_s, row.taken) for row in found] == [
        (0, pytest.approx(0.61), None),
        (1, pytest.approx(0.45), pytest.approx(0.75)),
        (0, pytest.approx(0.01), None),
        (1, pytest.approx(0.05), None),
    ]
