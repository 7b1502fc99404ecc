"""Problems that are data: of the hub or of files, checked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rewards.draw import rng_for, too_few
from rewards.problem import Problem, Rules, Split
from rewards.rows import Row, Source, rows_of
from rewards.split import split_of


class DataConfig(BaseModel):
    """What tasks have in common whose problems are data."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    train_data: Path | None = None
    """A file (*.jsonl, *.json, *.csv, *.parquet, also .gz) with the columns that the dataset on the hub has, instead of
    that."""
    heldout_data: Path | None = None
    """The same for the held-out problems. Where only one of the two files is given, both splits are cut from it and the
    hub is left alone."""
    heldout_fraction: Annotated[float, Field(ge=0.05, le=0.5)] = 0.2
    """Fraction of the questions that is held out, where both splits are cut from one source."""
    reward: Rules = "fixed"
    """The reward that is trained on."""
    protocol: Rules = "fixed"
    """What counts as correct in evaluation."""


class Dataset:
    """The problems of a task whose problems are data."""

    def __init__(
        self, task: str, config: DataConfig, hub: Mapping[Split, Source], pose: Callable[[Row], Problem]
    ) -> None:
        """Take where the problems are. `pose` makes one of a row, or raises ValueError in one sentence with its place.

        A problem's id is its task and its question: `pose` leaves that to `problem_id`.
        """
        self._task, self._config, self._pose = task, config, pose
        given = {Split.TRAIN: config.train_data, Split.HELDOUT: config.heldout_data}
        files = {split: path for split, path in given.items() if path is not None}
        self._sources: Mapping[Split, Path | Source] = files or hub
        # Read once: the preflight asks for both splits, and the coordinator again for each of its phases.
        self._all = cache(self._read)

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems of a split in the order of a seed: a smaller count gives a prefix of a larger one's.

        Raises ValueError, in one sentence, where the data cannot be used or the split has fewer.
        """
        found = list(self._split(split))
        if not found:
            raise ValueError(f"the {split} split of {self._task} is empty: {self._origin(split)} has no problem for it")
        if count > len(found):
            raise ValueError(too_few(task=self._task, split=split, available=len(found), count=count))
        rng_for(f"{self._task}/{split}/{seed}").shuffle(found)
        return found[:count]

    def size(self, split: Split) -> int:
        """How many problems a split has. Raises ValueError as `problems`."""
        return len(self._split(split))

    def _split(self, split: Split) -> tuple[Problem, ...]:
        if split in self._sources and len(self._sources) > 1:
            return self._all(split)
        only = next(iter(self._sources))
        fraction = self._config.heldout_fraction
        return tuple(p for p in self._all(only) if split_of(p.problem_id, fraction) == split)

    def _read(self, split: Split) -> tuple[Problem, ...]:
        found: dict[str, str] = {}
        problems = []
        for row in rows_of(self._sources[split]):
            problem = self._pose(row)
            if problem.problem_id in found:
                raise ValueError(
                    f"{row.place} has the problem of {found[problem.problem_id]} again "
                    f"(its id is {problem.problem_id}); each should be there once"
                )
            found[problem.problem_id] = row.place
            problems.append(problem)
        return tuple(problems)

    def _origin(self, split: Split) -> str:
        return str(self._sources.get(split) or next(iter(self._sources.values())))


def problem_id(task: str, question: str) -> str:
    """The id of the problem that asks a question: equal for equal questions, whatever file they are from."""
    return f"{task}/{sha256(question.strip().encode(errors='surrogatepass')).hexdigest()[:16]}"
