"""Plain text as data: text files, and directories of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rewards.data.files import read_text, suffix_of
from rewards.data.rows import Row

TEXT_SUFFIXES = (".txt", ".md")
"""Of files of plain text; a directory of them may have directories inside."""
SEPARATOR = "<|endoftext|>"
"""Ends a document in a file that has several, as published collections of texts write it."""
_OF_ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def text_files(path: Path) -> list[Path]:
    """The files of plain text that a path names, in the order of their names; none where it names rows.

    A directory with a file of rows is a dataset, whose text files describe it.
    """
    if not path.is_dir():
        return [path] if suffix_of(path) in TEXT_SUFFIXES else []
    inside = [one for one in sorted(path.rglob("*")) if one.is_file() and not _is_hidden(one.relative_to(path))]
    if any(suffix_of(one) in _OF_ROWS for one in inside):
        return []
    return [one for one in inside if suffix_of(one) in TEXT_SUFFIXES]


def text_rows(path: Path) -> Iterator[Row]:
    """The documents of a file, each a row with the one column `text`; `SEPARATOR` divides them.

    Raises ValueError, in one sentence, where the file cannot be read or is no text.
    """
    texts = [text.strip("\n") for text in read_text(path).split(SEPARATOR)]
    documents = [text for text in texts if text.strip()]
    for number, text in enumerate(documents, start=1):
        place = f"{path}, document {number}" if len(documents) > 1 else str(path)
        yield Row(place=place, fields={"text": text})


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
