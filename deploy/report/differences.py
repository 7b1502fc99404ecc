"""Recipes side by side: every field by its path, and those in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = ""
# Of every run its own.
_OWN = ("name", "runs_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A field of the recipes."""

    path: str
    """As an override names it: `learner.lr`."""
    values: tuple[str, ...]
    """In each recipe; empty where it has none."""

    @property
    def differs(self) -> bool:
        """Whether the recipes do not agree on it."""
        return len(set(self.values)) > 1


def fields_of(recipes: Sequence[Mapping[str, Any]]) -> list[Field]:
    """The fields that any of the recipes has, in their order."""
    flat = [dict(_flat(recipe, "")) for recipe in recipes]
    paths = dict.fromkeys(path for values in flat for path in values if path not in _OWN)
    return [Field(path=path, values=tuple(values.get(path, _ABSENT) for values in flat)) for path in paths]


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)
