"""A structure: what a request's text must be, as its author says it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What the text of an answer must be. Hashable: equal ones share a grammar."""

    kind: Literal["schema", "regex"]
    text: str
    """A JSON schema, or a regular expression that the whole text matches."""
    field: str
    """Where the body has it."""

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any], field: str) -> Structure:
        """JSON that a schema allows."""
        return cls(kind="schema", text=json.dumps(schema), field=field)

    @classmethod
    def of_regex(cls, regex: str, field: str) -> Structure:
        """What a regular expression matches as a whole."""
        return cls(kind="regex", text=regex, field=field)

    @classmethod
    def of_choices(cls, choices: Sequence[str], field: str) -> Structure:
        """One of some texts."""
        return cls.of_regex("|".join(map(_literally, choices)), field)


# What a regular expression reads as more than itself.
_SIGNS = frozenset(r"\.+*?()|[]{}^$#&-~")


def _literally(text: str) -> str:
    return "".join(f"\\{character}" if character in _SIGNS else character for character in text)
