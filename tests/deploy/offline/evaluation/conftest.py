"""Fixtures to run `d1 eval` in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.offline.item import AnsweredBatch, Batch
from deploy.offline.worker import Worker


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """One worker in this process. Returns the batches that it received, in order."""
    asked: list[Batch] = []

    def answer(self: Worker, batch: Batch) -> AnsweredBatch:
        asked.append(batch)
        return whole(self, batch)

    whole = Worker.answer
    monkeypatch.setattr(Worker, "answer", answer)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    return asked


@pytest.fixture
def evaluate(d1: Callable, runs: Path, workdir: Path) -> Callable:
    """`d1 eval tiny ...`, with answers below `workdir`."""

    def run(*words: str) -> object:
        return d1("eval", "tiny", "--runs-dir", str(runs), "--out", str(workdir / "out"), *words)

    return run
