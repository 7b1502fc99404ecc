"""JSON schema support: checks the keywords and rewrites a schema for the grammar library.

The library ignores unknown keywords, and of some combinations it applies only one. An answer could then violate the
schema. So every keyword is supported, known to constrain nothing, or rejected by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

MAX_NODES = 1024
"""Maximum number of subschemas, with references resolved."""
MAX_DEPTH = 32
"""Maximum nesting of schemas, with references resolved."""
MAX_VALUES = 4096
"""Maximum values of all `enum` together, with references resolved."""
MAX_LENGTH = 128
"""Larger `maxLength` and `maxItems` are reduced to it: shorter values satisfy the schema too."""

_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator"),
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    }
)
_OF_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems", "prefixItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset[str](),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# A day past the 28th is not in every month.
_DATE = r"[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
# A final `$` that is not escaped.
_LAST_ANCHOR = re.compile(r"((?:^|[^\\])(?:\\\\)*)\$\Z")
_LARGEST = 2**63
_NO_NAME = re.compile(r'["\\\x00-\x1f\x7f-\x9f\ud800-\udfff]')


class SchemaError(ValueError):
    """Error for an unsupported schema: a sentence without a full stop."""


def library_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite a schema so that the grammar library interprets it correctly. Raises SchemaError if unsupported."""
    return _SchemaRewriter(schema).read(schema, (), "")


class _SchemaRewriter:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._num_nodes, self._depth, self._num_values = root, 0, 0, 0

    def read(self, schema: Any, refs: tuple[str, ...], place: str) -> dict[str, Any]:
        """Rewrite a subschema of the root; `refs` are the references that led here, `place` is its path."""
        self._num_nodes += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SchemaError(f"is nested more than {MAX_DEPTH} levels deep, references followed")
        found = self._read(schema, refs, place)
        self._depth -= 1
        return found

    def _read(self, schema: Any, refs: tuple[str, ...], place: str) -> dict[str, Any]:
        if self._num_nodes > MAX_NODES:
            raise SchemaError(f"has more than {MAX_NODES} schemas, references followed")
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise SchemaError(f"has {_shown(schema)}{_at(place)}, where a schema is needed")
        if "$id" in schema and self._depth > 1:
            raise SchemaError(f"has `$id`{_at(place)}: references relative to it are not served")
        given = {key: value for key, value in schema.items() if key not in _ANNOTATIONS and not key.startswith("x-")}
        for keyword, read in (("$ref", self._ref), ("anyOf", self._any_of), ("allOf", self._all_of)):
            if keyword in given:
                _expect_only(given, {keyword}, place)
                return read(given[keyword], refs, place)
        if "const" in given or "enum" in given:
            found = _values(given, place)
            self._num_values += len(found["enum"])
            if self._num_values > MAX_VALUES:
                raise SchemaError(f"has more than {MAX_VALUES} values, references followed")
            return found
        return self._of_type(given, refs, place)

    def _ref(self, ref: Any, refs: tuple[str, ...], place: str) -> dict[str, Any]:
        if not isinstance(ref, str) or not ref.startswith("#/"):
            raise SchemaError(f"has the reference {_shown(ref)}{_at(place)}; references begin with `#/`")
        if ref in refs:
            raise SchemaError(f"refers to itself by {_shown(ref)}: a recursive schema has no finite automaton")
        found: Any = self._root
        for name in ref.removeprefix("#/").split("/"):
            key = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise SchemaError(f"has no {_shown(ref)}, which it refers to")
            found = found[key]
        return self.read(found, (*refs, ref), place)

    def _any_of(self, schemas: Any, refs: tuple[str, ...], place: str) -> dict[str, Any]:
        return {"anyOf": self._each(schemas, refs, f"{place}/anyOf")}

    def _all_of(self, schemas: Any, refs: tuple[str, ...], place: str) -> dict[str, Any]:
        if not isinstance(schemas, Sequence) or len(schemas) != 1:
            raise SchemaError(f"has `allOf`{_at(place)} with other than one schema, which is not served: merge them")
        return self.read(schemas[0], refs, place)

    def _each(self, schemas: Any, refs: tuple[str, ...], place: str) -> list[dict[str, Any]]:
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError(f"has {_shown(schemas)}{_at(place)}, where a list of schemas is needed")
        return [self.read(schema, refs, f"{place}/{index}") for index, schema in enumerate(schemas)]

    def _of_type(self, given: Mapping[str, Any], refs: tuple[str, ...], place: str) -> dict[str, Any]:
        if "type" not in given:
            # Without `type`, the keywords of one type leave all other types unconstrained.
            is_typed = any(given.keys() & known for known in _OF_TYPE.values())
            _expect_only(given, {"type"}, place, "; name a `type`" if is_typed else "")
            return {}
        types = _types(given, place)
        _expect_only(given, {"type"}.union(*(_OF_TYPE[kind] for kind in types)), place)
        made = [self._of_one_type(kind, given, refs, place) for kind in dict.fromkeys(types)]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _of_one_type(self, kind: str, given: Mapping[str, Any], refs: tuple[str, ...], place: str) -> dict[str, Any]:
        if kind == "object":
            return self._object(given, refs, place)
        if kind == "array":
            return self._array(given, refs, place)
        return _string(given, place) if kind == "string" else {"type": kind}

    def _object(self, given: Mapping[str, Any], refs: tuple[str, ...], place: str) -> dict[str, Any]:
        properties, others = given.get("properties"), given.get("additionalProperties", True)
        required = given.get("required", [])
        if not isinstance(properties, Mapping | None) or not isinstance(required, list):
            raise SchemaError(f"has `properties` that are not an object, or `required` that is not a list{_at(place)}")
        if missing := [name for name in required if not isinstance(name, str) or name not in (properties or {})]:
            raise SchemaError(f"requires {_shown(missing[0])}{_at(place)}, which is not among its `properties`")
        if properties is None and others is True:
            return {"type": "object"}
        if properties is None and others is not False:
            return {"type": "object", "additionalProperties": self.read(others, refs, f"{place}/additionalProperties")}
        made = {}
        for name, schema in (properties or {}).items():
            if _NO_NAME.search(name):
                raise SchemaError(
                    f"has the property {_shown(name)}{_at(place)}; names with quotes, backslashes or "
                    "control characters are not served"
                )
            made[name] = self.read(schema, refs, f"{place}/{name}")
        return {"type": "object", "properties": made, "required": list(dict.fromkeys(required))}

    def _array(self, given: Mapping[str, Any], refs: tuple[str, ...], place: str) -> dict[str, Any]:
        least, most = _bounds(given, "minItems", "maxItems", place)
        if "prefixItems" in given:
            items = self._each(given["prefixItems"], refs, f"{place}/prefixItems")
            if least > len(items) or (most is not None and most < len(items)):
                raise SchemaError(f"has `prefixItems`{_at(place)} that are not between `minItems` and `maxItems`")
            return {"type": "array", "prefixItems": items}
        of_all = {"items": self.read(given["items"], refs, f"{place}/items")} if "items" in given else {}
        return {"type": "array", "minItems": least} | of_all | ({} if most is None else {"maxItems": most})


def _string(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    shape = sorted(given.keys() & {"pattern", "format"})
    if shape:
        others = given.keys() & _OF_TYPE["string"] - {shape[0]}
        if others:
            raise SchemaError(f"has `{shape[0]}` with `{min(others)}`{_at(place)}; one of them is served")
        return {"type": "string", "pattern": _pattern(given, place)}
    least, most = _bounds(given, "minLength", "maxLength", place)
    return {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})


def _pattern(given: Mapping[str, Any], place: str) -> str:
    """Return the pattern in a group, since the library puts it between quotes unchanged."""
    if "format" in given:
        if not isinstance(given["format"], str) or given["format"] not in _FORMATS:
            raise SchemaError(f"has the format {_shown(given['format'])}{_at(place)}; served are {', '.join(_FORMATS)}")
        return f"({_FORMATS[given['format']]})"
    pattern = given["pattern"]
    if not isinstance(pattern, str):
        raise SchemaError(f"has the pattern {_shown(pattern)}{_at(place)}, which is not a string")
    # A pattern may match anywhere in a text. The texts that it matches as a whole are a subset of those.
    whole = _LAST_ANCHOR.sub(r"\1", pattern.removeprefix("^"))
    return f"({whole})"


def _values(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    keyword = "const" if "const" in given else "enum"
    _expect_only(given, {keyword, "type"}, place)
    values = [given["const"]] if keyword == "const" else given["enum"]
    if not isinstance(values, list) or not values:
        raise SchemaError(f"has an `enum`{_at(place)} that is not a list, or is empty")
    of_types = Draft202012Validator({"type": _types(given, place)} if "type" in given else True)
    if inexact := [value for value in values if not _is_exact(value)]:
        why = "in which a number is none of JSON's, or too large to be exact"
        raise SchemaError(f"has the value {_shown(inexact[0])}{_at(place)}, {why}")
    if strays := [value for value in values if not of_types.is_valid(value)]:
        raise SchemaError(f"has the value {_shown(strays[0])}{_at(place)}, which is not of its `type`")
    return {"enum": values}


def _types(given: Mapping[str, Any], place: str) -> list[str]:
    types = given["type"] if isinstance(given["type"], list) else [given["type"]]
    if not types or any(not isinstance(kind, str) or kind not in _OF_TYPE for kind in types):
        raise SchemaError(f"has the type {_shown(given['type'])}{_at(place)}; types are {', '.join(_OF_TYPE)}")
    return types


def _is_exact(value: Any) -> bool:
    """Return whether the library reproduces a value exactly: integers fit into 64 bits, floats are finite."""
    if isinstance(value, Mapping | list):
        return all(map(_is_exact, value.values() if isinstance(value, Mapping) else value))
    # Compared without conversion: a large integer does not fit into a float.
    return not isinstance(value, int | float) or abs(value) < _LARGEST


def _bounds(given: Mapping[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
    for keyword in (least, most):
        value = given.get(keyword, 0)
        if type(value) is not int or value < 0:
            raise SchemaError(f"has the `{keyword}` {_shown(value)}{_at(place)}, which is not a count")
    if given.get(least, 0) > given.get(most, given.get(least, 0)):
        raise SchemaError(f"has a `{least}` above its `{most}`{_at(place)}")
    if given.get(least, 0) > MAX_LENGTH:
        raise SchemaError(f"has the `{least}` {given[least]}{_at(place)}; {MAX_LENGTH} is the most")
    return given.get(least, 0), min(given[most], MAX_LENGTH) if most in given else None


def _expect_only(given: Mapping[str, Any], known: set[str] | frozenset[str], place: str, advice: str = "") -> None:
    if strays := sorted(given.keys() - known):
        known_ones = (
            " with " + " and ".join(f"`{key}`" for key in sorted(given.keys() & known)) if given.keys() & known else ""
        )
        raise SchemaError(f"has {_shown(strays[0])}{known_ones}{_at(place)}, which is not served{advice}")


def _at(place: str) -> str:
    return f" at {repr(place)[1:-1][:128]}" if place else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:61]}..."
