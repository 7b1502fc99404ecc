"""Problems loaded from the hub or from files, validated as they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from rewards.data.rows import Row
from rewards.data.sampling import TooFewProblemsError, rng_for
from rewards.data.sources import HubSplit, absolute_source, rows_of
from rewards.data.split import SplitConfig, split_of, train_or_validation
from rewards.problem import GradingRules, Problem, Split


class DataSources(SplitConfig):
    """User-supplied files or datasets for a task's problems."""

    train_data: Path | None = None
    """Training problems, including those for validation: a file, a directory, or a dataset of the hub, as `org/name` or
    `org/name/config:split`; docs/rewards.md lists file types and columns."""
    heldout_data: Path | None = None
    """The same for the held-out problems."""

    def with_absolute_paths(self) -> Self:
        """Return a copy that is valid in a process with another current directory."""
        paths = {name: getattr(self, name) for name in ("train_data", "heldout_data")}
        return self.model_copy(update={name: path and absolute_source(path) for name, path in paths.items()})


class RuledSources(DataSources):
    """Sources of a task that can be graded by the rules of the first d1, too."""

    reward: GradingRules = "fixed"
    """Rules of the training reward."""
    protocol: GradingRules = "fixed"
    """Rules for what evaluation counts as correct."""


class DataConfig(RuledSources):
    """Settings common to tasks with loaded problems. Without files they come from the hub. With one file, both splits
    are cut from it and the hub is not used."""

    heldout_fraction: Annotated[float, Field(ge=0.05, le=0.5)] = 0.2
    """Fraction of the questions that is held out if both splits are cut from one source."""


class FileProblems:
    """Problems from files, for a task that generates the splits without a file."""

    def __init__(
        self, files: DataSources, make_problem: Callable[[Row], Problem], solution_of: Callable[[Problem], str]
    ) -> None:
        """Store the files; each is read on first use.

        `make_problem` is the same as for `Dataset`; `solution_of` returns the key by which the task's splits are made.
        """
        self._files, self._make_problem, self._solution_of = files, make_problem, solution_of
        self._all = cache(self._read)
        self._solutions = cache(self._read_solutions)
        self.warnings: list[str] = []
        """Warnings about what was left out of the files read so far."""

    def of(self, split: Split) -> tuple[Problem, ...] | None:
        """Return all problems of a split's file; None if it has none. Raises ValueError as `load_problems`."""
        found = self._all(split is Split.HELDOUT)
        if found is None or split is Split.HELDOUT:
            return found
        return tuple(problem for problem in found if self._train_or_validation(self._solution_of(problem)) is split)

    def belongs_to(self, split: Split, solution: str, heldout_fraction: float) -> bool:
        """Return whether a generated problem belongs to a split that has no file.

        If the other split has a file, solutions in that file are excluded. Without files `split_of` decides.
        """
        taken = self._solutions(split is not Split.HELDOUT)
        if taken is None:
            return split_of(solution, heldout_fraction, self._files.validation_fraction) is split
        return solution not in taken and (split is Split.HELDOUT or self._train_or_validation(solution) is split)

    def _train_or_validation(self, solution: str) -> Split:
        return train_or_validation(solution, self._files.validation_fraction)

    def _read_solutions(self, is_heldout: bool) -> frozenset[str] | None:
        found = self._all(is_heldout)
        return None if found is None else frozenset(map(self._solution_of, found))

    def _read(self, is_heldout: bool) -> tuple[Problem, ...] | None:
        path = self._files.heldout_data if is_heldout else self._files.train_data
        return None if path is None else load_problems(path, self._make_problem, self.warnings)


class Dataset:
    """The problems of a task that loads them."""

    def __init__(
        self, task: str, config: DataConfig, hub: Mapping[Split, HubSplit], make_problem: Callable[[Row], Problem]
    ) -> None:
        """Store the sources. `make_problem` makes a problem of a row, or raises ValueError with its place.

        A problem's id is derived from its task, its question and its tests: `make_problem` should use `problem_id`.
        """
        self._task, self._config, self._make_problem = task, config, make_problem
        given = {Split.TRAIN: config.train_data, Split.HELDOUT: config.heldout_data}
        files = {split: path for split, path in given.items() if path is not None}
        self._sources: Mapping[Split, Path | HubSplit] = files or hub
        # Read once: the preflight needs both splits, and the coordinator needs them again in each of its phases.
        self._all = cache(self._read)
        self.warnings: list[str] = []
        """Warnings about what was left out of the data read so far."""

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` problems of a split in the order of a seed: a smaller count gives a prefix of a larger one's.

        Raises ValueError if the data cannot be used or the split has fewer problems.
        """
        found = self._split(split)
        if not found:
            raise ValueError(f"the {split} split of {self._task} is empty: {self._origin(split)} has no problem for it")
        return shuffled_prefix(found, task=self._task, split=split, count=count, seed=seed)

    def size(self, split: Split) -> int | None:
        """Return the number of problems of a split without downloading it. Raises ValueError as `problems`.

        None if the split is cut from a dataset of the hub: the cut depends on all of its questions.
        """
        source = self._sources[self._source_of(split)]
        if isinstance(source, HubSplit):
            return None if self._is_cut(split) else source.num_rows
        return len(self._split(split))

    def max_size(self, split: Split) -> int:
        """Return the number of problems of a split, reading it if necessary. Raises ValueError as `problems`."""
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
        """Return the key of the source that contains the problems of a split, perhaps among others."""
        whose = Split.HELDOUT if split is Split.HELDOUT else Split.TRAIN
        return whose if whose in self._sources else next(iter(self._sources))

    def _is_cut(self, split: Split) -> bool:
        """Return whether a split is only a part of its source."""
        if len(self._sources) == 1 or split is Split.VALIDATION:
            return True
        return split is Split.TRAIN and self._config.validation_fraction > 0

    def _read(self, split: Split) -> tuple[Problem, ...]:
        """Read the problems of a source. Hub training problems whose question is held out there are removed.

        Files are used as they are.
        """
        found = load_problems(self._sources[split], self._make_problem, self.warnings)
        if split is Split.HELDOUT or not isinstance(self._sources.get(Split.HELDOUT), HubSplit):
            return found
        asked = {question_of(problem.problem_id) for problem in self._all(Split.HELDOUT)}
        return tuple(problem for problem in found if question_of(problem.problem_id) not in asked)

    def _origin(self, split: Split) -> str:
        return str(self._sources[self._source_of(split)])


class DataTask:
    """Base of tasks with loaded problems: a subclass defines their source and how a row becomes a problem."""

    name: str
    """The task's name."""
    hub: ClassVar[Mapping[Split, HubSplit]]
    """Sources on the hub."""
    example_row: ClassVar[Mapping[str, Any]]
    """The columns of a built-in example row."""

    def __init__(self, config: DataConfig) -> None:
        """Store the config without reading any data."""
        self._dataset = Dataset(self.name, config, self.hub, self._make_problem)

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return the same as `Dataset.problems`."""
        return self._dataset.problems(split, count, seed)

    def size(self, split: Split) -> int | None:
        """Return the same as `Dataset.size`."""
        return self._dataset.size(split)

    def max_size(self, split: Split) -> int:
        """Return the same as `Dataset.max_size`."""
        return self._dataset.max_size(split)

    def warnings(self) -> list[str]:
        """Return warnings about what was left out of the data read so far."""
        return self._dataset.warnings

    def example(self) -> Problem:
        """Return a built-in example, which needs no data."""
        return self._make_problem(Row(place="the example", fields=self.example_row))

    def _make_problem(self, row: Row) -> Problem:
        """Return the problem of a row. Raises ValueError, with the row's place, if it is not a problem."""
        raise NotImplementedError


def load_problems(
    source: Path | HubSplit, make_problem: Callable[[Row], Problem], warnings: list[str]
) -> tuple[Problem, ...]:
    """Return the problems of a source's rows. Of equal ones the first is kept; a warning reports the others.

    Raises ValueError if the source cannot be read or a row is not a problem.
    """
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    # Hashes of the rows so far. Published sets repeat some rows a hundred times, and a hash is cheaper than a problem.
    seen: dict[bytes, tuple[str, bool]] = {}
    repeats, contradictions, num_rows = _Found(), _Found(), 0
    for row in rows_of(source):
        num_rows += 1
        digest = sha256(repr(row.fields).encode(errors="surrogatepass")).digest()
        if digest not in seen:
            problem = make_problem(row)
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
        warnings.append(_left_out(source, num_rows, repeats, contradictions))
    return tuple(problems.values())


@dataclass(kw_only=True, slots=True)
class _Found:
    """Rows that repeat a problem in one way."""

    count: int = 0
    """Number of such rows."""
    places: tuple[str, str] = ("", "")
    """Place of the first such row, and of the problem that it repeats."""

    def add(self, row: Row, before: str) -> None:
        if not self.count:
            self.places = row.place, before
        self.count += 1


def _left_out(source: Path | HubSplit, num_rows: int, repeats: _Found, contradictions: _Found) -> str:
    """Return the warning about rows that repeat a problem."""

    def first(found: _Found) -> str:
        # The sentence already begins with the source.
        place, before = (place.removeprefix(f"{source}, ") for place in found.places)
        return f"first {place} (as {before})"

    verbs = "repeats an earlier problem and is" if repeats.count == 1 else "repeat an earlier problem and are"
    sentence = f"{source}: {repeats.count:,} of {num_rows:,} rows {verbs} left out, {first(repeats)}"
    if not contradictions.count:
        return sentence
    differ = "differs" if contradictions.count == 1 else "differ"
    return f"{sentence}; {contradictions.count:,} of them {differ} in the answer, {first(contradictions)}"


def shuffled_prefix(found: Sequence[Problem], *, task: str, split: Split, count: int, seed: int) -> list[Problem]:
    """Return the first `count` problems in the order of a seed. Raises ValueError if there are fewer."""
    if count > len(found):
        raise TooFewProblemsError(task=task, split=split, available=len(found), count=count)
    shuffled = list(found)
    rng_for(f"{task}/{split}/{seed}").shuffle(shuffled)
    return shuffled[:count]


def file_order(problems: Sequence[Problem], *, task: str, split: Split, seed: int) -> list[Problem]:
    """Restore the file order of all problems of a split from that of a seed: the inverse of `shuffled_prefix`."""
    order = list(range(len(problems)))
    rng_for(f"{task}/{split}/{seed}").shuffle(order)
    return [problem for _, problem in sorted(zip(order, problems, strict=True), key=lambda pair: pair[0])]


def problem_id(task: str, question: str, *tests: str) -> str:
    """Return the id of a problem with this question and these tests, independent of the file that it comes from."""
    asked = f"{task}/{_hash(question.strip())}"
    return f"{asked}-{_hash(json.dumps(tests))}" if tests else asked


def question_of(problem_id: str) -> str:
    """Return the part of an id that all problems with the same question share, by which splits are made."""
    return problem_id.partition("-")[0]


def _hash(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
