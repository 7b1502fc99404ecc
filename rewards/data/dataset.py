"""Problems that are data: of the hub or of files, checked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rewards.data.draw import TooFewProblemsError, rng_for
from rewards.data.rows import HubSplit, Row, rows_of
from rewards.data.split import split_of
from rewards.problem import Problem, Rules, Split


class Files(BaseModel):
    """Files that a task's problems can come from."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    train_data: Path | None = None
    """A file with training problems: *.jsonl, *.json, *.csv or *.parquet, also with .gz; docs/rewards.md has its
    columns."""
    heldout_data: Path | None = None
    """The same for the held-out problems."""


class DataConfig(Files):
    """What tasks have in common whose problems are data. Where neither file is given, they come from the hub; where one
    is, both splits are cut from it and the hub is left alone."""

    heldout_fraction: Annotated[float, Field(ge=0.05, le=0.5)] = 0.2
    """Fraction of the questions that is held out, where both splits are cut from one source."""
    reward: Rules = "fixed"
    """The reward that is trained on."""
    protocol: Rules = "fixed"
    """What counts as correct in evaluation."""


class FileProblems:
    """The problems of the splits that a file is given for, of a task that makes the others itself."""

    def __init__(self, files: Files, pose: Callable[[Row], Problem]) -> None:
        """Take the files; each is read when it is first asked for. `pose` is as for `Dataset`."""
        self._paths = {Split.TRAIN: files.train_data, Split.HELDOUT: files.heldout_data}
        self._pose = pose
        self._all = cache(self._read)

    def of(self, split: Split) -> tuple[Problem, ...] | None:
        """All problems of a split's file, None where it has none. Raises ValueError as `posed_rows`."""
        return self._all(split)

    def beside(self, split: Split) -> tuple[Problem, ...] | None:
        """Those of the other split's file: what must not be made for this one."""
        return self._all(Split.HELDOUT if split is Split.TRAIN else Split.TRAIN)

    def _read(self, split: Split) -> tuple[Problem, ...] | None:
        path = self._paths[split]
        return None if path is None else posed_rows(path, self._pose)


class Dataset:
    """The problems of a task whose problems are data."""

    def __init__(
        self, task: str, config: DataConfig, hub: Mapping[Split, HubSplit], pose: Callable[[Row], Problem]
    ) -> None:
        """Take where the problems are. `pose` makes one of a row, or raises ValueError in one sentence with its place.

        A problem's id is its task and its question: `pose` leaves that to `problem_id`.
        """
        self._task, self._config, self._pose = task, config, pose
        given = {Split.TRAIN: config.train_data, Split.HELDOUT: config.heldout_data}
        files = {split: path for split, path in given.items() if path is not None}
        self._sources: Mapping[Split, Path | HubSplit] = files or hub
        # Read once: the preflight asks for both splits, and the coordinator again for each of its phases.
        self._all = cache(self._read)

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems of a split in the order of a seed: a smaller count gives a prefix of a larger one's.

        Raises ValueError, in one sentence, where the data cannot be used or the split has fewer.
        """
        found = self._split(split)
        if not found:
            raise ValueError(f"the {split} split of {self._task} is empty: {self._origin(split)} has no problem for it")
        return chosen(found, task=self._task, split=split, count=count, seed=seed)

    def size(self, split: Split) -> int | None:
        """How many problems a split has; what the hub has is not fetched for it. Raises ValueError as `problems`.

        None where the split is cut from a dataset of the hub: the cut is by the questions, so it takes all of them.
        """
        source = self._sources.get(split, next(iter(self._sources.values())))
        if isinstance(source, HubSplit):
            return source.num_rows if len(self._sources) > 1 else None
        return len(self._split(split))

    def at_most(self, split: Split) -> int:
        """How many problems a split has, read for it where need be. Raises ValueError as `problems`."""
        return len(self._split(split))

    def _split(self, split: Split) -> tuple[Problem, ...]:
        if split in self._sources and len(self._sources) > 1:
            return self._all(split)
        only = next(iter(self._sources))
        fraction = self._config.heldout_fraction
        return tuple(p for p in self._all(only) if split_of(p.problem_id, fraction) == split)

    def _read(self, split: Split) -> tuple[Problem, ...]:
        return posed_rows(self._sources[split], self._pose)

    def _origin(self, split: Split) -> str:
        return str(self._sources.get(split) or next(iter(self._sources.values())))


class DataTask:
    """What tasks have in common whose problems are data: a subclass says where they are, and how a row is posed."""

    name: str
    """The task's."""
    hub: ClassVar[Mapping[Split, HubSplit]]
    """Where they are on the hub."""
    example_row: ClassVar[Mapping[str, Any]]
    """The columns of a row of our own."""

    def __init__(self, config: DataConfig) -> None:
        """Read nothing yet."""
        self._dataset = Dataset(self.name, config, self.hub, self._pose)

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """As `Dataset.problems`."""
        return self._dataset.problems(split, count, seed)

    def size(self, split: Split) -> int | None:
        """As `Dataset.size`."""
        return self._dataset.size(split)

    def at_most(self, split: Split) -> int:
        """As `Dataset.at_most`."""
        return self._dataset.at_most(split)

    def example(self) -> Problem:
        """One of ours, which needs no data."""
        return self._pose(Row(place="the example", fields=self.example_row))

    def _pose(self, row: Row) -> Problem:
        """The problem of a row. Raises ValueError, in one sentence with its place, for what is none."""
        raise NotImplementedError


def posed_rows(source: Path | HubSplit, pose: Callable[[Row], Problem]) -> tuple[Problem, ...]:
    """The problem of every row of a file or of a split on the hub.

    Raises ValueError, in one sentence, where it cannot be had, a row is no problem, or two are the same one.
    """
    places: dict[str, str] = {}
    problems = []
    for row in rows_of(source):
        problem = pose(row)
        if problem.problem_id in places:
            raise ValueError(
                f"{row.place} has the problem of {places[problem.problem_id]} again (its id is {problem.problem_id}); "
                "each should be there once"
            )
        places[problem.problem_id] = row.place
        problems.append(problem)
    return tuple(problems)


def chosen(found: Sequence[Problem], *, task: str, split: Split, count: int, seed: int) -> list[Problem]:
    """The first `count` of them in the order of a seed. Raises ValueError, in one sentence, where there are fewer."""
    if count > len(found):
        raise TooFewProblemsError(task=task, split=split, available=len(found), count=count)
    shuffled = list(found)
    rng_for(f"{task}/{split}/{seed}").shuffle(shuffled)
    return shuffled[:count]


def unshuffled(problems: Sequence[Problem], *, task: str, split: Split, seed: int) -> list[Problem]:
    """All problems of a split in the order of their file, from that of a seed: what undoes `chosen`."""
    order = list(range(len(problems)))
    rng_for(f"{task}/{split}/{seed}").shuffle(order)
    return [problem for _, problem in sorted(zip(order, problems, strict=True), key=lambda pair: pair[0])]


def problem_id(task: str, question: str) -> str:
    """The id of the problem that asks a question: equal for equal questions, whatever file they are from."""
    return f"{task}/{sha256(question.strip().encode(errors='surrogatepass')).hexdigest()[:16]}"
