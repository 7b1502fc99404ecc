"""Tests of the pipeline benchmarks: coordinator, overlap, evaluation and staleness."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from actors.messages import Next, WeightsId
from actors.spec import RunSpec
from benchmarks.pipeline import coordinator, evaluation, overlap
from benchmarks.pipeline.evaluation import Row, Way


def test_simulated_samplers_complete_every_round() -> None:
    with patch("actors.coordination.coordinator.RunGauges", coordinator.NoGauges):
        row = asyncio.run(coordinator.measured(num_samplers=5, portion_s=0.02, num_rounds=2))
    # Each sampler handles four work units in sequence.
    assert row.round_s > 4 * 0.02
    assert 0 < row.at_work <= 1
    assert row.at_work == pytest.approx(4 * 0.02 / row.round_s, rel=0.5)
    assert row.groups_per_s == pytest.approx(5 * 4 * 2 / row.round_s)
    assert 0 < row.dispatch_s[0] <= row.dispatch_s[1] < row.round_s
    assert row.cpu_of_portion_s > 0


def test_taken_is_the_share_of_the_possible_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(spec: RunSpec, sampling_s: float, learning_s: float) -> tuple[list[float], float]:
        both, longer = sampling_s + learning_s, max(sampling_s, learning_s)
        assert spec.work_units_per_round == 4
        return [9.0, both + 0.01 if not spec.learner.max_staleness else longer + 0.05, 0.0], 0.002

    monkeypatch.setattr(overlap, "simulated_rounds", rounds)
    found = list(overlap.simulated([(0.2, 0.4), (0.0, 0.0)], num_rounds=3, repeats=1, tell=str))
    assert [(row.staleness, row.round_s, row.taken) for row in found] == [
        (0, pytest.approx(0.61), None),
        (1, pytest.approx(0.45), pytest.approx(0.75)),
        (0, pytest.approx(0.01), None),
        (1, pytest.approx(0.05), None),
    ]


class _Client:
    """Records the learner's requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def next_batch(self, index: int, weights_id: WeightsId, label: str) -> tuple[Next, list[object]]:
        self.asked.append(("next", index, weights_id.version, label))
        return Next.CONTINUE, []

    def published(self, *_: object) -> None:
        self.asked.append(("published",))

    def evaluate(self, weights_id: WeightsId, label: str, index: int, *, is_new: bool) -> Next:
        self.asked.append(("evaluate", weights_id.version, label, is_new))
        return Next.CONTINUE


@pytest.mark.parametrize(
    ("way", "label", "evaluated"),
    [(Way.NONE, "", []), (Way.WAITED, "", ["evaluate"]), (Way.BESIDE, "round", ["evaluate"])],
)
def test_an_evaluation_is_requested_with_its_round_or_alone(way: Way, label: str, evaluated: list[str]) -> None:
    client = _Client()
    evaluation._round(client, 3, 0.0, way)  # type: ignore[arg-type]
    assert client.asked[0] == ("next", 3, 4, label)
    assert [asked[0] for asked in client.asked[1:]] == ["published", *evaluated]


@pytest.mark.parametrize(
    ("staleness", "learning_s", "limits"),
    [(0, 0.3, [0.6, 0.9, 0.6]), (1, 0.3, [0.3, 0.6, 0.6]), (1, 0.6, [0.6, 0.9, 0.6])],
)
def test_the_limit_of_a_round_follows_from_sampling_and_learning_times(
    staleness: int, learning_s: float, limits: list[float]
) -> None:
    rows = [Row(sampling_s=0.3, learning_s=learning_s, staleness=staleness, way=way, round_s=1.0) for way in Way]
    assert [row.limit_s for row in rows] == pytest.approx(limits)
