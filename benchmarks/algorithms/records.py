"""Trial results on disk: one JSON Lines file per task. `results/` has those of the docs' tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.algorithms.report import Result
from benchmarks.algorithms.trial import Trial


class Records:
    """Results in a folder. Not safe for concurrent processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, trial: Trial) -> Result | None:
        """Return a trial's result, or None if it has not run yet."""
        wanted = (trial.row, trial.seed, trial.rate)
        return next((one for one in self.of([trial.task]) if (one.row, one.seed, one.rate) == wanted), None)

    def of(self, tasks: Sequence[str]) -> Iterator[Result]:
        """Yield all results of some tasks."""
        for path in map(self._path, tasks):
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            yield from (Result(**json.loads(line)) for line in lines)

    def keep(self, result: Result) -> None:
        """Append a result to its task's file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._path(result.task).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def _path(self, task: str) -> Path:
        return self._directory / f"{task}.jsonl"
