"""Structure of a request's text: a JSON schema or a regular expression."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# A character with a special meaning in a regular expression.
_SIGN = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """JSON schema or regular expression that the text of an answer must match."""

    kind: Literal["schema", "regex"]
    text: str
    """A JSON schema, or a regular expression that the whole text matches."""
    field: str
    """Name of the body's field."""

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any], field: str) -> Structure:
        """Create a structure from a JSON schema."""
        return cls(kind="schema", text=json.dumps(schema), field=field)

    @classmethod
    def of_choices(cls, choices: Sequence[str], field: str) -> Structure:
        """Create a structure that allows exactly the given texts."""
        return cls(kind="regex", text="|".join(_SIGN.sub(r"\\\g<0>", choice) for choice in choices), field=field)
