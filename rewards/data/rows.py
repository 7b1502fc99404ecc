"""Rows of data: a task's problems from the hub or from a file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KINDS = "*.jsonl, *.json (a list of objects), *.csv or *.parquet, the first three also with .gz"
_LONGEST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row, and where it stands."""

    place: str
    """File (or dataset and split) and line, for sentences about it."""
    fields: Mapping[str, Any]
    """Its columns."""

    def text(self, column: str) -> str:
        """The text in a column. Raises ValueError, in one sentence, where the column is missing, no text or empty."""
        value = self.value(column)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.place}: {column} is {shown(value)}; it should be a text that says something")
        return value

    def value(self, column: str) -> Any:
        """What a column holds. Raises ValueError, in one sentence, where the row has no such column."""
        if column not in self.fields:
            has = ", ".join(sorted(self.fields)[:12]) or "none"
            raise ValueError(f"{self.place} has no column {column}; its columns are {has}")
        return self.fields[column]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSplit:
    """One split of a dataset on the hub."""

    repo: str
    """`org/name`, or a directory that `datasets` can load."""
    split: str
    """Which split."""
    config: str | None = None
    """Which of the dataset's configs, where it has several."""
    num_rows: int | None = None
    """How many problems it has as published, to be said without fetching it: its rows, less those to train on that ask
    what is held out. None where nobody has counted."""

    def __str__(self) -> str:
        return f"{self.repo}, split {self.split}"


def rows_of(source: Path | HubSplit) -> list[Row]:
    """All rows of a file or of a split on the hub, in order.

    Raises ValueError, in one sentence, where it cannot be had, is no rows, or has none.
    """
    rows = _hub_rows(source) if isinstance(source, HubSplit) else list(_file_rows(source))
    if not rows:
        raise ValueError(f"{source} has no rows")
    return rows


def shown(value: object) -> str:
    """A value as it fits into a sentence."""
    if value is None:
        return "missing"
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _hub_rows(source: HubSplit) -> list[Row]:
    # Slow to import, and needed only where no file is given.
    import datasets

    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(source.repo, source.config, split=source.split)
    except Exception as error:
        # It raises its own, the hub's, the network's and pyarrow's errors.
        first = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ValueError(f"the dataset {source} cannot be loaded: {first}; a local file can take its place") from error
    return [Row(place=f"{source}, row {number}", fields=fields) for number, fields in enumerate(data, start=1)]


def _file_rows(path: Path) -> Iterator[Row]:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    try:
        match suffix:
            case ".jsonl":
                yield from _numbered(path, _json_lines(path))
            case ".json":
                yield from _numbered(path, _json_list(path), unit="row")
            case ".csv":
                yield from _numbered(path, _csv_rows(path), unit="row")
            case ".parquet" if path.suffix != ".gz":
                yield from _numbered(path, _parquet(path), unit="row")
            case _:
                raise ValueError(f"{path} is of no kind that can be read; it should be {_KINDS}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _numbered(path: Path, rows: Iterable[Any], unit: str = "line") -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        if fields is None:
            continue
        place = f"{path}, {unit} {number}"
        if not isinstance(fields, dict):
            raise ValueError(f"{place} is {shown(fields)}; it should be an object with a value for each column")
        if None in fields:
            # Where `csv` puts them.
            raise ValueError(f"{place} has more cells than the {len(fields) - 1} columns of the first line")
        yield Row(place=place, fields=fields)


def _json_lines(path: Path) -> Iterator[Any]:
    """The value of each line, None for an empty one."""
    for number, line in enumerate(_text(path).split("\n"), start=1):
        yield _parsed(line, f"{path}, line {number}") if line.strip() else None


def _json_list(path: Path) -> list[Any]:
    rows = _parsed(_text(path), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} is {shown(rows)}; it should be a list of objects, one for each row")
    return rows


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg} at character {error.colno}") from error
    except (RecursionError, ValueError) as error:
        # Nested thousands deep, or a number of thousands of digits.
        raise ValueError(f"{place} is not JSON that can be read: {error}") from error


def _csv_rows(path: Path) -> Iterator[Any]:
    try:
        yield from csv.DictReader(io.StringIO(_text(path), newline=""))
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV that can be read: {error}") from error


def _parquet(path: Path) -> list[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return list(parquet.read_table(path).to_pylist())
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not Parquet: {str(error).partition(chr(10))[0]}") from error


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode()
    except UnicodeDecodeError as error:
        *before, line = data[: error.start].split(b"\n")
        place = f"{path}, line {len(before) + 1}: byte {len(line) + 1}"
        raise ValueError(f"{place} is not UTF-8; save the file as UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not gzip: {error}") from error
