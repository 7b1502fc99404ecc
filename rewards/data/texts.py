"""Plain-text data: text files, and directories of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rewards.data.files import read_text, suffix_of
from rewards.data.rows import Row

TEXT_SUFFIXES = (".txt", ".md")
"""Suffixes of plain-text files. A directory of them may have subdirectories."""
SEPARATOR = "<|endoftext|>"
"""Ends a document in a file with several, as in published text collections."""
_OF_ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def text_files(path: Path) -> list[Path]:
    """Return the plain-text files at a path, sorted by name; none if the path contains rows.

    A directory with a file of rows is a dataset, whose text files describe it.
    """
    if not path.is_dir():
        return [path] if suffix_of(path) in TEXT_SUFFIXES else []
    inside = [one for one in sorted(path.rglob("*")) if one.is_file() and not _is_hidden(one.relative_to(path))]
    if any(suffix_of(one) in _OF_ROWS for one in inside):
        return []
    return [one for one in inside if suffix_of(one) in TEXT_SUFFIXES]


def text_rows(path: Path) -> Iterator[Row]:
    """Yield the documents of a file, separated by `SEPARATOR`, each as a row with the single column `text`.

    Raises ValueError if the file cannot be read or is not text.
    """
    texts = [text.strip("\n") for text in read_text(path).split(SEPARATOR)]
    documents = [text for text in texts if text.strip()]
    for number, text in enumerate(documents, start=1):
        place = f"{path}, document {number}" if len(documents) > 1 else str(path)
        yield Row(place=place, fields={"text": text})


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
