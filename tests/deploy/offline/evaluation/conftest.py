"""Fixtures to run `d1 eval` in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deploy.offline.evaluation.problems import EvaluationBatch
from deploy.offline.pool import PoolSettings
from deploy.offline.worker import AnsweredBatch, Worker, WorkerConfig


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> list[EvaluationBatch]:
    """One worker in this process instead of a pool. Returns the batches that it received, in order."""
    asked: list[EvaluationBatch] = []

    def answers(config: WorkerConfig, _: PoolSettings, batches: Sequence[EvaluationBatch]) -> Iterator[AnsweredBatch]:
        worker = Worker(config)
        for batch in batches:
            asked.append(batch)
            yield worker.answer(batch)

    monkeypatch.setattr("deploy.offline.evaluation.evaluate.answer_batches", answers)
    return asked


@pytest.fixture
def evaluate(d1: Callable, runs: Path, workdir: Path) -> Callable:
    """`d1 eval tiny ...`, with answers below `workdir`."""

    def run(*words: str) -> object:
        return d1("eval", "tiny", "--runs-dir", str(runs), "--out", str(workdir / "out"), *words)

    return run
