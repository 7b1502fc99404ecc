"""Validation errors of recipes and requests, as one sentence for the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

Schema = dict[str, Any]

_LONGEST_SHOWN = 60
# Last part of pydantic's location if the key itself is invalid.
_KEY_ITSELF = "[key]"
# By pydantic's error type.
_EXPECTATIONS = (
    dict.fromkeys(("model_type", "model_attributes_type"), "be a section of keys and values")
    | {"dict_type": "be an object of keys and values", "list_type": "be a list"}
    | dict.fromkeys(("bool_type", "bool_parsing"), "be true or false")
    | dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "be a whole number")
    | dict.fromkeys(("float_type", "float_parsing"), "be a number")
    | {"path_type": "be a path", "string_type": "be text"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldProblem:
    """Problem with one key."""

    key: str
    """Dotted; empty for the whole recipe."""
    sentence: str
    """What is wrong and what would be right, without the place where it was written."""


def first_problem(error: ValidationError, schema: Schema, whole: str = "recipe") -> tuple[FieldProblem, int]:
    """Return the first problem and the number of further ones. Unknown keys come first: they explain missing ones.

    `schema` is the JSON schema of the input, `whole` its name in messages.
    """
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    return _problem(details[0], schema, whole), len(details) - 1


def shortened(text: str, width: int = _LONGEST_SHOWN) -> str:
    """Shorten a text, by default to fit into a sentence."""
    return text if len(text) <= width else f"{text[:width]}..."


def _problem(detail: ErrorDetails, schema: Schema, whole: str) -> FieldProblem:
    key, node = _locate(detail["loc"], schema)
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag, names = node["discriminator"]["propertyName"], ", ".join(node["discriminator"]["mapping"])
        given = _shown(detail["input"][tag]) if tag in detail["input"] else "missing"
        return FieldProblem(key=f"{key}.{tag}", sentence=f"{key}.{tag} is {given}; it should be one of {names}")
    return FieldProblem(key=key, sentence=_sentence(detail, key, node, schema, whole))


def _sentence(detail: ErrorDetails, key: str, node: Schema, schema: Schema, whole: str) -> str:
    match detail["type"]:
        case "string_pattern_mismatch" if detail["loc"][-1] == _KEY_ITSELF:
            return f"{key} should be named with letters, digits and underscores, the first a letter"
        case "extra_forbidden" | "invalid_key":
            return _unknown_key(key, node, schema, whole)
        case "missing":
            about = node.get("description", "a value")
            return f"{key} is missing; it is needed: {about[:1].lower()}{about[1:]}".rstrip(".")
        case "value_error" if str(detail["ctx"]["error"]).startswith("must "):
            return f"{key} is {_shown(detail['input'])}; it should {str(detail['ctx']['error']).removeprefix('must ')}"
        case "value_error":
            return f"{key}: {detail['ctx']['error']}" if key else str(detail["ctx"]["error"])
    return f"{key} is {_shown(detail['input'])}; it should {_expectation(detail, key)}"


def _expectation(detail: ErrorDetails, key: str) -> str:
    kind, limits = detail["type"], detail.get("ctx", {})
    if kind == "string_type" and isinstance(detail["input"], int | float):
        return "be text: put it in quotes"
    if kind == "string_pattern_mismatch" and key == "name":
        return "be up to 80 letters, digits, dots, dashes and underscores, the first a letter or a digit"
    if kind == "too_long":
        return f"have at most {limits['max_length']} values"
    if kind in _EXPECTATIONS:
        return _EXPECTATIONS[kind]
    # Pydantic: `Input should be greater than or equal to 2`.
    expected = detail["msg"].rpartition(" should ")[2]
    return expected.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _unknown_key(key: str, section: Schema, schema: Schema, whole: str) -> str:
    parent, _, name = key.rpartition(".")
    siblings = sorted(section.get("properties", {}))
    close = [_joined(parent, near) for near in get_close_matches(name, siblings, n=1)]
    own: dict[str, None] = {}
    _collect(section, parent, schema, own)
    # Keys that other tasks have in this section, but this one does not.
    foreign = [known for known in all_keys(schema) if parent and known.startswith(f"{parent}.") and known not in own]
    elsewhere = [known for known in all_keys(schema) if known.rpartition(".")[2] == name and known not in foreign]
    if guesses := close or elsewhere:
        return f"{key} is no key of a {whole}; did you mean {' or '.join(guesses[:3])}?"
    return f"{key} is no key of {'this ' + parent if parent else f'a {whole}'}, which has {', '.join(siblings)}"


def all_keys(schema: Schema) -> list[str]:
    """Return every dotted key that a recipe can have, including every task's, in the order of the schema."""
    found: dict[str, None] = {}
    _collect(schema, "", schema, found)
    return list(found)


def _collect(node: Schema, prefix: str, schema: Schema, found: dict[str, None]) -> None:
    for branch in [_resolved(branch, schema) for branch in node.get("oneOf", [])] or [node]:
        for name, child in branch.get("properties", {}).items():
            key = _joined(prefix, name)
            found[key] = None
            _collect(_resolved(child, schema), key, schema, found)


def _locate(location: Sequence[str | int], schema: Schema) -> tuple[str, Schema]:
    """Return the dotted key of an error's location, and the schema of it, or else of its section."""
    key, node = "", schema
    # An error of a key itself is reported at that key.
    for part in [part for part in location if part != _KEY_ITSELF]:
        if "discriminator" in node:
            # Pydantic puts the name of the chosen member between the key of a union and the member's own keys.
            node = _resolved({"$ref": node["discriminator"]["mapping"][part]}, schema)
        elif isinstance(part, int) and "properties" not in node:
            key, node = f"{key}[{part}]", _resolved(node.get("items", node), schema)
        else:
            key = _joined(key, str(part))
            node = _resolved(_child(node, part), schema)
    return key, node


def _child(node: Schema, part: str | int) -> Schema:
    """Return the schema of a section's key; in a section whose keys the recipe chooses, the schema of all of them."""
    chosen = node.get("patternProperties", {})
    child: Schema = node.get("properties", {}).get(part) or next(iter(chosen.values()), node)
    return child


def _resolved(node: Schema, schema: Schema) -> Schema:
    # An optional value is either its type or null: take the type.
    node = node | next((choice for choice in node.get("anyOf", ()) if "$ref" in choice or "items" in choice), {})
    if "$ref" not in node:
        return node
    target: Schema = schema["$defs"][node["$ref"].rpartition("/")[2]]
    # A description next to the reference is the field's; the target has only its class's.
    return target | {name: value for name, value in node.items() if name != "$ref"}


def _shown(value: Any) -> str:
    return "empty" if value is None else shortened(repr(value))


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
