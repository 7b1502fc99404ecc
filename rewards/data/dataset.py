"""Problems that are data: of the hub or of files, checked as they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from rewards.data.draw import TooFewProblemsError, rng_for
from rewards.data.rows import Row
from rewards.data.sources import HubSplit, from_anywhere, rows_of
from rewards.data.split import SplitConfig, kept_split_of, split_of
from rewards.problem import Problem, Rules, Split


class Files(SplitConfig):
    """Files, or datasets of one's own choice, that a task's problems can come from."""

    train_data: Path | None = None
    """Training problems, of which those for validation are taken: a file, a directory, or a dataset of the hub, as
    `org/name` or `org/name/config:split`; docs/rewards.md says which kinds and columns."""
    heldout_data: Path | None = None
    """The same for the held-out problems."""

    def from_anywhere(self) -> Self:
        """The config that means the same in a process with another current directory."""
        paths = {name: getattr(self, name) for name in ("train_data", "heldout_data")}
        return self.model_copy(update={name: path and from_anywhere(path) for name, path in paths.items()})


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
    """The problems read from files, for a task that generates the splits without a file."""

    def __init__(self, files: Files, pose: Callable[[Row], Problem], solution_of: Callable[[Problem], str]) -> None:
        """Take the files; each is read when it is first asked for.

        `pose` is as for `Dataset`; `solution_of` names what the splits of the task are made by.
        """
        self._files, self._pose, self._solution_of = files, pose, solution_of
        self._all = cache(self._read)
        self._solutions = cache(self._read_solutions)
        self.remarks: list[str] = []
        """What was left out of the files that have been read, in sentences."""

    def of(self, split: Split) -> tuple[Problem, ...] | None:
        """All problems of a split's file, None where it has none. Raises ValueError as `posed_rows`."""
        found = self._all(split is Split.HELDOUT)
        if found is None or split is Split.HELDOUT:
            return found
        return tuple(problem for problem in found if self._kept_split_of(self._solution_of(problem)) is split)

    def is_made_for(self, split: Split, solution: str, heldout_fraction: float) -> bool:
        """Whether a generated problem belongs to a split that has no file.

        Where the other split has a file, solutions in that file are excluded. Without files `split_of` decides.
        """
        taken = self._solutions(split is not Split.HELDOUT)
        if taken is None:
            return split_of(solution, heldout_fraction, self._files.validation_fraction) is split
        return solution not in taken and (split is Split.HELDOUT or self._kept_split_of(solution) is split)

    def _kept_split_of(self, solution: str) -> Split:
        return kept_split_of(solution, self._files.validation_fraction)

    def _read_solutions(self, is_heldout: bool) -> frozenset[str] | None:
        found = self._all(is_heldout)
        return None if found is None else frozenset(map(self._solution_of, found))

    def _read(self, is_heldout: bool) -> tuple[Problem, ...] | None:
        path = self._files.heldout_data if is_heldout else self._files.train_data
        return None if path is None else posed_rows(path, self._pose, self.remarks)


class Dataset:
    """The problems of a task whose problems are data."""

    def __init__(
        self, task: str, config: DataConfig, hub: Mapping[Split, HubSplit], pose: Callable[[Row], Problem]
    ) -> None:
        """Take where the problems are. `pose` makes one of a row, or raises ValueError in one sentence with its place.

        A problem's id is its task, its question and what else it is made of: `pose` leaves that to `problem_id`.
        """
        self._task, self._config, self._pose = task, config, pose
        given = {Split.TRAIN: config.train_data, Split.HELDOUT: config.heldout_data}
        files = {split: path for split, path in given.items() if path is not None}
        self._sources: Mapping[Split, Path | HubSplit] = files or hub
        # Read once: the preflight asks for both splits, and the coordinator again for each of its phases.
        self._all = cache(self._read)
        self.remarks: list[str] = []
        """What was left out of what has been read, in sentences."""

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
        source = self._sources[self._source_of(split)]
        if isinstance(source, HubSplit):
            return None if self._is_cut(split) else source.num_rows
        return len(self._split(split))

    def at_most(self, split: Split) -> int:
        """How many problems a split has, read for it where need be. Raises ValueError as `problems`."""
        return len(self._split(split))

    def _split(self, split: Split) -> tuple[Problem, ...]:
        found = self._all(self._source_of(split))
        if not self._is_cut(split):
            return found
        heldout_fraction = 0.0 if len(self._sources) > 1 else self._config.heldout_fraction
        validation_fraction = self._config.validation_fraction
        fractions = heldout_fraction, validation_fraction
        return tuple(p for p in found if split_of(question_of(p.problem_id), *fractions) is split)

    def _source_of(self, split: Split) -> Split:
        """Which of the sources has the problems of a split, perhaps among others."""
        whose = Split.HELDOUT if split is Split.HELDOUT else Split.TRAIN
        return whose if whose in self._sources else next(iter(self._sources))

    def _is_cut(self, split: Split) -> bool:
        """Whether a split is a part of its source."""
        if len(self._sources) == 1 or split is Split.VALIDATION:
            return True
        return split is Split.TRAIN and self._config.validation_fraction > 0

    def _read(self, split: Split) -> tuple[Problem, ...]:
        """The problems of a source; of the hub's training problems those that ask what is not held out there.

        Files are taken as they are.
        """
        found = posed_rows(self._sources[split], self._pose, self.remarks)
        if split is Split.HELDOUT or not isinstance(self._sources.get(Split.HELDOUT), HubSplit):
            return found
        asked = {question_of(problem.problem_id) for problem in self._all(Split.HELDOUT)}
        return tuple(problem for problem in found if question_of(problem.problem_id) not in asked)

    def _origin(self, split: Split) -> str:
        return str(self._sources[self._source_of(split)])


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

    def remarks(self) -> list[str]:
        """What was left out of the data that has been read, in sentences."""
        return self._dataset.remarks

    def example(self) -> Problem:
        """One of ours, which needs no data."""
        return self._pose(Row(place="the example", fields=self.example_row))

    def _pose(self, row: Row) -> Problem:
        """The problem of a row. Raises ValueError, in one sentence with its place, for what is none."""
        raise NotImplementedError


def posed_rows(source: Path | HubSplit, pose: Callable[[Row], Problem], remarks: list[str]) -> tuple[Problem, ...]:
    """The problems of the rows of a source. Of equal ones the first is kept; what that leaves out becomes a remark.

    Raises ValueError, in one sentence, where the source cannot be had or a row is no problem.
    """
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    # Of the rows that were posed: published sets have some a hundred times, and a look is cheaper than a problem.
    seen: dict[bytes, tuple[str, bool]] = {}
    repeats, contradictions, num_rows = _Found(), _Found(), 0
    for row in rows_of(source):
        num_rows += 1
        digest = sha256(repr(row.fields).encode(errors="surrogatepass")).digest()
        if digest not in seen:
            problem = pose(row)
            name = problem.problem_id
            first = problems.setdefault(name, problem)
            seen[digest] = name, problem.answer != first.answer
            if first is problem:
                places[name] = row.place
                continue
        name, differs = seen[digest]
        repeats.add(row, places[name])
        if differs:
            contradictions.add(row, places[name])
    if repeats.count:
        remarks.append(_left_out(source, num_rows, repeats, contradictions))
    return tuple(problems.values())


@dataclass(kw_only=True, slots=True)
class _Found:
    """Rows that repeat a problem in one way."""

    count: int = 0
    """How many."""
    places: tuple[str, str] = ("", "")
    """Where the first of them is, and where the problem was before."""

    def add(self, row: Row, before: str) -> None:
        if not self.count:
            self.places = row.place, before
        self.count += 1


def _left_out(source: Path | HubSplit, num_rows: int, repeats: _Found, contradictions: _Found) -> str:
    """What a user is told of rows that repeat a problem."""

    def first(found: _Found) -> str:
        # The sentence begins with the source.
        place, before = (place.removeprefix(f"{source}, ") for place in found.places)
        return f"first {place} (as {before})"

    verbs = "repeats an earlier problem and is" if repeats.count == 1 else "repeat an earlier problem and are"
    sentence = f"{source}: {repeats.count:,} of {num_rows:,} rows {verbs} left out, {first(repeats)}"
    if not contradictions.count:
        return sentence
    differ = "differs" if contradictions.count == 1 else "differ"
    return f"{sentence}; {contradictions.count:,} of them {differ} in the answer, {first(contradictions)}"


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


def problem_id(task: str, question: str, *tests: str) -> str:
    """The id of the problem that asks a question, and is tested so: equal for equal ones, whatever file has them."""
    asked = f"{task}/{_hash(question.strip())}"
    return f"{asked}-{_hash(json.dumps(tests))}" if tests else asked


def question_of(problem_id: str) -> str:
    """The same of all problems that ask one question: what splits are made by."""
    return problem_id.partition("-")[0]


def _hash(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
