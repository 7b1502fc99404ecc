"""Readers for files of rows: JSON lines, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewards.data.encoding import MARK, decode_text
from rewards.data.rows import Row, preview

if TYPE_CHECKING:
    from pyarrow import RecordBatch

FILE_KINDS = "*.jsonl, *.json, *.csv, *.tsv or *.parquet, all but the last also with .gz"
"""The supported file types, for error messages."""

# Rows of Parquet that are converted to Python objects at a time.
_BATCH_ROWS = 1024
# Signatures of unsupported file types, whatever the file's name.
_FOREIGN = {
    b"PK\x03\x04": "is a workbook of Excel or a zip archive; save it as CSV UTF-8",
    b"version https://git-lfs": "is what Git LFS has in place of the file; fetch the file with `git lfs pull`",
}
_GZIP = b"\x1f\x8b"
# Lines above the column names of a CSV file, as written by Excel and PowerShell.
_PREAMBLE = re.compile(r"(?:\"?sep=(?P<delimiter>[^\"\n])\"?|\"?#TYPE [^\r\n]*)(?:\r\n?|\n)", re.IGNORECASE)


def suffix_of(path: Path) -> str:
    """Return the lower-case suffix of a file without `.gz`: `.csv` for `X.CSV.gz`."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def file_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file in order. Raises ValueError if it cannot be read or does not contain rows."""
    with _readable(path):
        match suffix_of(path):
            case ".jsonl" | ".ndjson":
                yield from _numbered(path, _json_lines(path, _text(path)), unit="line")
            case ".json":
                yield from _json(path, _text(path))
            case ".csv" | ".tsv":
                yield from _numbered(path, _csv_rows(path, _text(path)))
            case ".parquet" if path.suffix.lower() != ".gz":
                yield from _numbered(path, _parquet(path))
            case _:
                raise ValueError(f"{path} is of no kind that can be read; it should be {FILE_KINDS}")


def read_text(path: Path) -> str:
    """Return the text of a file, which may be compressed by gzip. Raises ValueError if it is not text."""
    with _readable(path):
        return _text(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise ValueError within the block for a file that cannot be read, or has another type than its name says."""
    try:
        with path.open("rb") as file:
            head = file.read(max(map(len, _FOREIGN)))
        for begin, what in _FOREIGN.items():
            if head.startswith(begin):
                raise ValueError(f"{path} {what}")
        yield
    except OSError as error:
        why = (error.strerror or str(error)).partition("\n")[0].lower()
        raise ValueError(f"{path} cannot be read: {why}") from error


def _numbered(path: Path, rows: Iterable[Any], unit: str = "row") -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        if fields is None:
            continue
        place = f"{path}, {unit} {number}"
        if not isinstance(fields, dict):
            raise ValueError(f"{place} is {preview(fields)}; it should be an object with a value for each column")
        yield Row(place=place, fields=fields)


def _json_lines(path: Path, text: str) -> Iterator[Any]:
    """Yield the value of each line, None for an empty one."""
    for number, line in enumerate(text.split("\n"), start=1):
        # Concatenated files keep their byte order marks.
        unmarked = line.lstrip(MARK)
        yield _parsed(unmarked, f"{path}, line {number}") if unmarked.strip() else None


def _json(path: Path, text: str) -> Iterator[Row]:
    """Yield the rows of a list of objects, or of objects on lines, for which the suffix is also used."""
    first = text.lstrip().partition("\n")[0]
    if first.startswith("{") and _is_json(first) and text.strip() != first.strip():
        yield from _numbered(path, _json_lines(path, text), unit="line")
        return
    rows = _parsed(text, str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} is {preview(rows)}; it should be a list of objects, one for each row")
    yield from _numbered(path, rows)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg} at character {error.colno}") from error
    except (RecursionError, ValueError) as error:
        # Nested too deeply, or a number with too many digits.
        raise ValueError(f"{place} is not JSON that can be read: {error}") from error


def _csv_rows(path: Path, text: str) -> Iterator[dict[str, str | None] | None]:
    """Yield each row as a dict by the names in the first line; None for a blank row, as spreadsheets leave them."""
    preamble = _PREAMBLE.match(text)
    text = text[preamble.end() :] if preamble else text
    delimiter = (preamble and preamble["delimiter"]) or _delimiter(text)
    # If the header has spaces after delimiters, so do the rows.
    is_spaced = f"{delimiter} " in text.partition("\n")[0]
    # Without `strict`, an unclosed quote would turn the rest of the file into one cell.
    cells = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=is_spaced, strict=True)
    try:
        names = [name.strip().lstrip(MARK) for name in next((row for row in cells if row), [])]
        _check_names(path, names)
        for number, row in enumerate((row for row in cells if row), start=1):
            if len(row) > len(names):
                columns = f"the {len(names)} columns of the first line"
                raise ValueError(
                    f"{path}, row {number} has more cells than {columns}; put a text with {delimiter!r} in quotes"
                )
            padded = [*row, *[None] * (len(names) - len(row))]
            yield dict(zip(names, padded, strict=True)) if any(cell.strip() for cell in row) else None
    except csv.Error as error:
        raise ValueError(
            f"{path} is not CSV that can be read: {error} (line {cells.line_num + bool(preamble)})"
        ) from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise ValueError(f"{path} has the column {twice} twice; each should be there once")


def _delimiter(text: str) -> str:
    """Return the delimiter of the first line: a comma, or else a semicolon or tab, as spreadsheets write."""
    first = text.lstrip("\r\n").partition("\n")[0]
    return next((delimiter for delimiter in ",;\t" if delimiter in first), ",")


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            _check_names(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from _in_short_decimals(batch).to_pylist(maps_as_pydicts="lossy")
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not Parquet that can be read: {str(error).partition(chr(10))[0]}") from error


def _in_short_decimals(batch: RecordBatch) -> RecordBatch:
    """Convert float32 columns to their shortest decimals: 0.1 instead of 0.10000000149011612."""
    import pyarrow as pa

    for index, field in enumerate(batch.schema):
        if pa.types.is_float32(field.type):
            short = batch.column(index).cast(pa.string()).cast(pa.float64())
            batch = batch.set_column(index, field.name, short)
    return batch


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return decode_text(gzip.decompress(data) if path.suffix.lower() == ".gz" or data.startswith(_GZIP) else data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not gzip: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error
