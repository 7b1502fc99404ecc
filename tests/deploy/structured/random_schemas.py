"""Random JSON schemas from all that is supported."""

from __future__ import annotations

import random
from typing import Any

_VALUES: list[Any] = ["a", 'b"q', "é\n\\", 1, 2.5, None, True, {"k": [1]}, "", []]
_PATTERNS = ["^[a-z]+$", "a|bc", "[0-9]{2,3}x?", "^(foo|bar)$"]
_FORMATS = ["date", "uuid", "time", "date-time"]
_LEAVES = ["string", "integer", "number", "boolean", "null", "values"]


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema."""
    kind = draw.choice(_LEAVES + (["object", "array", "anyOf"] * 2 if depth < 3 else []))
    if kind == "object":
        return _object(draw, depth)
    if kind == "array":
        return _array(draw, depth)
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "values":
        return {"enum": draw.sample(_VALUES, draw.randint(1, 4))} if draw.random() < 0.7 else {"const": _VALUES[2]}
    if kind == "string":
        return _string(draw)
    return {"type": kind if draw.random() < 0.8 or kind == "null" else [kind, "null"]}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth == 2 and draw.random() < 0.2:
        return {"type": "object", "additionalProperties": {"type": "integer"}}
    names = [f"{draw.choice(['name', 'x', 'é', 'a b', '.*'])}{index}" for index in range(draw.randint(0, 3))]
    properties = {name: random_schema(draw, depth + 1) for name in names}
    required = [name for name in properties if draw.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": draw.random() < 0.5,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.2:
        items = [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 2))]
        return {"type": "array", "prefixItems": items}
    least = draw.randint(0, 2)
    bounds = {"minItems": least, "maxItems": least + draw.randint(0, 2)}
    given = {key: value for key, value in bounds.items() if draw.random() < 0.5}
    return {"type": "array", "items": random_schema(draw, depth + 2)} | given


def _string(draw: random.Random) -> dict[str, Any]:
    shape = draw.choice(["any", "any", "least", "most", "pattern", "format"])
    given = {
        "any": {},
        "least": {"minLength": draw.randint(0, 3)},
        "most": {"maxLength": draw.randint(0, 6)},
        "pattern": {"pattern": draw.choice(_PATTERNS)},
        "format": {"format": draw.choice(_FORMATS)},
    }
    return {"type": "string"} | given[shape]
