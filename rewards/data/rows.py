"""Rows of data, and lookup of nested values by dotted path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_SHOWN = 60
_MOST_COLUMNS = 12
_DEEPEST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row and its place."""

    place: str
    """File (or dataset and split) and line, for error messages."""
    fields: Mapping[str, Any]
    """Its columns."""

    def text(self, column: str) -> str:
        """Return the text in a column. Raises ValueError if the column is missing, not a text, or empty."""
        value = self.value(column)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.place}: {column} is {preview(value)}; it should be a text that says something")
        return value

    def value(self, column: str) -> Any:
        """Return the content of a column. Raises ValueError if the row has no such column."""
        if column not in self.fields:
            raise ValueError(f"{self.place} has no column {column}; its columns are {_names(self.fields)}")
        return self.fields[column]


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, such as `reward_model.ground_truth` or `answers.text.0`.

    A column whose own name has dots takes precedence over a path. A numeric part indexes a list. A text that is JSON is
    parsed. Returns None if something on the way is null. Raises ValueError, without the row's place, if there is no
    such path.
    """
    found = _at(fields, path)
    if not isinstance(found, _Missing):
        return found
    if not found.parent:
        raise ValueError(f"there is no column {path}; the columns are {_names(fields)}")
    if found.has:
        raise ValueError(f"{found.parent} has no {found.part}; it has {found.has}")
    raise ValueError(f"{found.parent} is {preview(found.value)}, which has no {found.part} inside")


def leaves(fields: Mapping[str, Any], depth: int = _DEEPEST) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of each value that is not null; those of the row itself come before nested ones."""
    nested = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            nested.append((name, value))
        elif value is not None:
            yield name, name
    for name, value in nested if depth > 1 else ():
        for path, own in leaves(value, depth - 1):
            yield f"{name}.{path}", own


def preview(value: object) -> str:
    """Return a value as short text for an error message."""
    if value is None:
        return "missing"
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Missing:
    """The position where a path ends too early."""

    parent: str
    """The path to that position; empty for the row itself."""
    part: str
    """The part of the path that does not exist."""
    has: str
    """What exists instead; empty for nothing."""
    value: Any = None
    """The value at `parent`, if it has no parts."""


def _at(value: Any, path: str, parent: str = "") -> Any:
    if isinstance(value, str):
        value = json_in(value)
    if isinstance(value, list):
        return _in_list(value, path, parent)
    if isinstance(value, Mapping):
        return value[path] if path in value else _in_columns(value, path, parent)
    return None if value is None else _Missing(parent=parent, part=path, has="", value=value)


def _in_list(value: list[Any], path: str, parent: str) -> Any:
    part, _, rest = path.partition(".")
    if not (part.isdecimal() and int(part) < len(value)):
        return _Missing(parent=parent, part=part, has=f"a list of {len(value)}, counted from 0")
    return _at(value[int(part)], rest, _joined(parent, part)) if rest else value[int(part)]


def _in_columns(value: Mapping[str, Any], path: str, parent: str) -> Any:
    """Look a path up in the column with the longest name that is a prefix of it."""
    parts = path.split(".")
    heads = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    found = [_at(value[head], path[len(head) + 1 :], _joined(parent, head)) for head in heads if head in value]
    missing = _Missing(parent=parent, part=parts[0], has=_names(value))
    return next((one for one in found if not isinstance(one, _Missing)), next(iter(found), missing))


def json_in(text: str) -> Any:
    """Parse a text that is a JSON list or object; any other text is returned as it is."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, fields))[:_MOST_COLUMNS]) or "none"


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
