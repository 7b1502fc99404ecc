"""Comparison of recipes: every field by its path, and whether the recipes differ in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = ""
# Left out, because they differ in every run.
_OWN = ("name", "runs_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of the compared recipes."""

    path: str
    """Dotted path, as in an override: `learner.lr`."""
    values: tuple[str, ...]
    """Its value in each recipe; empty if a recipe lacks it."""

    @property
    def differs(self) -> bool:
        """Whether the recipes differ in it."""
        return len(set(self.values)) > 1


def fields_of(recipes: Sequence[Mapping[str, Any]]) -> list[Field]:
    """Return all fields of the recipes, in order of first occurrence."""
    flat = [dict(_flat(recipe, "")) for recipe in recipes]
    paths = dict.fromkeys(path for values in flat for path in values if path not in _OWN)
    return [Field(path=path, values=tuple(values.get(path, _ABSENT) for values in flat)) for path in paths]


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)
