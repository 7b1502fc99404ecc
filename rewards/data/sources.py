"""Sources of rows: a file, a directory, or a dataset of the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from platform import node
from typing import Any

from rewards.data.files import file_rows, suffix_of
from rewards.data.rows import Row

# File suffixes, which no dataset name ends with.
_OF_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".zip", ".xlsx", ".arrow")
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:/(?P<config>[\w.-]+))?(?::(?P<split>.+))?")
_DIRECTORY = re.compile(r"(?P<repo>.+?):(?P<split>[^/]+)")
_CONFIGS = re.compile(r"Config name is missing.*available configs: \[(.*?)\]", re.DOTALL)
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSplit:
    """One split of a dataset on the hub, or of a directory that `datasets` can load."""

    repo: str
    """`org/name`, or the directory."""
    split: str
    """Which split."""
    config: str | None = None
    """The dataset's config, if it has several."""
    num_rows: int | None = None
    """Number of problems as published, known without downloading: its rows, minus training rows whose question is held
    out. None if unknown."""

    def __str__(self) -> str:
        return f"{self.repo}{f'/{self.config}' if self.config else ''}, split {self.split}"


def rows_of(source: Path | HubSplit) -> Iterator[Row]:
    """Return all rows of a source in order.

    A path is a file, a directory, or a dataset of the hub: `org/name`, `org/name/config`. The last two may be followed
    by a split, as in `org/name:test`; the default is `train`. Raises ValueError if the source cannot be read, does not
    contain rows, or is empty.
    """
    found = source if isinstance(source, HubSplit) else _found(source)
    rows = _hub_rows(found, is_named=found is not source) if isinstance(found, HubSplit) else file_rows(found)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{source} has no rows")
    return chain([first], rows)


def absolute_source(path: Path) -> Path:
    """Return a path that is valid in a process with another current directory. Hub names stay as they are."""
    found = _found(path)
    is_here = not isinstance(found, HubSplit) or Path(found.repo).is_dir()
    return path.absolute() if is_here else path


def _found(path: Path) -> Path | HubSplit:
    """Resolve a path to a file or a split."""
    if path.is_dir():
        return HubSplit(repo=str(path), split="train")
    if path.exists() or suffix_of(path) in _OF_FILES:
        return path
    local = _DIRECTORY.fullmatch(str(path))
    if local is not None and Path(local["repo"]).is_dir():
        return HubSplit(repo=local["repo"], split=local["split"])
    named = _HUB.fullmatch(str(path))
    if named is None:
        return path
    return HubSplit(repo=named["repo"], config=named["config"], split=named["split"] or "train")


def _hub_rows(source: HubSplit, *, is_named: bool) -> Iterator[Row]:
    """Return the rows of a split. `is_named`: whether the user gave it as a path, not the task."""
    # Slow to import, and needed only if no file is given.
    import datasets

    datasets.disable_progress_bars()
    try:
        return _loaded(source)
    except Exception as error:
        # `datasets` raises its own, the hub's, the network's and pyarrow's errors.
        sentence = f"the dataset {source} cannot be loaded: {_why(error)}"
        if not is_named:
            sentence += "; a local file can take its place"
        elif not Path(source.repo).is_dir():
            sentence += f"; and there is no file or directory {source.repo} here"
        raise ValueError(sentence) from error


def _loaded(source: HubSplit) -> Iterator[Row]:
    import datasets

    directory = Path(source.repo)
    if any((directory / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(source.repo)
        return _numbered(source, _of(source, saved) if isinstance(saved, datasets.DatasetDict) else saved)
    if directory.is_dir():
        # `datasets` resolves which files a split has. Its own loader would guess types: 7 for "007", a time for
        # "2024-01-01".
        files = datasets.load_dataset_builder(source.repo, source.config).config.data_files
        return chain.from_iterable(file_rows(Path(name)) for name in _of(source, files))
    return _numbered(source, datasets.load_dataset(source.repo, source.config, split=source.split))


def _of(source: HubSplit, splits: Mapping[str, Iterable[Any]]) -> Iterable[Any]:
    if source.split not in splits:
        raise ValueError(f"it has no split {source.split}; its splits are {', '.join(map(str, splits))}")
    return splits[source.split]


def _numbered(source: HubSplit, data: Iterable[Any]) -> Iterator[Row]:
    for number, fields in enumerate(data, start=1):
        yield Row(place=f"{source}, row {number}", fields=fields)


def _why(error: BaseException) -> str:
    """Return one line of an error, or of its cause if the error only says that something failed."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        return _why(error.__cause__)
    text = str(error).strip() or type(error).__name__
    if configs := _CONFIGS.search(text):
        return f"it has the configs {configs[1]}, and one is needed: ORG/NAME/CONFIG, or the files of one"
    if "OfflineModeIsEnabled" in text:
        return f"it is not in the cache of {node()}, and HF_HUB_OFFLINE keeps the hub from being asked"
    return text.partition("\n")[0].rstrip(".")
