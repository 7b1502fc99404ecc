"""Supported JSON schemas: what is unsupported or would be misread is refused by its name."""

from itertools import pairwise
from typing import Any

import pytest

from deploy.requests.structured.schema import MAX_DEPTH, MAX_LENGTH, MAX_NODES, SchemaError, library_schema

INT = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 3}, "has 'minimum' with `type`, which is not served"),
        ({"type": "string", "minimum": 3, "maxLength": 2}, "has 'minimum' with `maxLength` and `type`"),
        ({"oneOf": [INT]}, "has 'oneOf', which is not served"),
        ({"not": INT}, "has 'not', which is not served"),
        ({"minLength": 3}, "has 'minLength', which is not served; name a `type`"),
        ({"anyOf": [INT], "type": "integer"}, "has 'type' with `anyOf`, which is not served"),
        ({"anyOf": []}, "where a list of schemas is needed"),
        ({"anyOf": [INT, 3]}, "has 3 at /anyOf/1, where a schema is needed"),
        ({"allOf": [INT, INT]}, "merge them"),
        ({"type": "set"}, "has the type 'set'; types are object, array"),
        ({"type": []}, "has the type"),
        ({"type": "object", "properties": {"a": False}}, "has False at /a, where a schema is needed"),
        ({"type": "object", "required": ["b"]}, "requires 'b', which is not among its `properties`"),
        ({"type": "object", "properties": {'a"b': INT}}, "names with quotes, backslashes"),
        ({"type": "object", "properties": [1]}, "has `properties` that are not an object"),
        ({"type": "object", "minProperties": 1}, "has 'minProperties' with `type`"),
        ({"type": "object", "patternProperties": {}}, "has 'patternProperties'"),
        ({"type": "array", "items": INT, "uniqueItems": True}, "has 'uniqueItems' with `items` and `type`"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "has a `minItems` above its `maxItems`"),
        ({"type": "array", "minItems": MAX_LENGTH + 1}, f"{MAX_LENGTH} is the most"),
        ({"type": "array", "prefixItems": [INT], "minItems": 2}, "not between `minItems` and `maxItems`"),
        ({"type": "string", "minLength": -1}, "which is not a count"),
        ({"type": "string", "minLength": True}, "which is not a count"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "has `pattern` with `maxLength`; one of them is served"),
        ({"type": "string", "format": "email"}, "served are date, time, date-time, uuid"),
        ({"type": "string", "pattern": 3}, "which is not a string"),
        ({"type": "string", "format": ["date"]}, "has the format ['date']"),
        ({"type": [["a"]]}, "has the type [['a']]"),
        ({"enum": [1], "type": [{}]}, "has the type [{}]"),
        ({"type": "object", "properties": {"a": INT}, "required": [["a"]]}, "requires ['a']"),
        ({"enum": [float("nan")]}, "none of JSON's, or too large to be exact"),
        ({"const": 10**400}, "none of JSON's, or too large to be exact"),
        ({"enum": [1, {"a": -(10**309)}]}, "none of JSON's, or too large to be exact"),
        ({"const": {"a": [float("inf")]}, "type": "object"}, "none of JSON's, or too large to be exact"),
        ({"enum": [10**30]}, "none of JSON's, or too large to be exact"),
        ({"enum": []}, "has an `enum` that is not a list, or is empty"),
        ({"enum": [1, "a"], "type": "integer"}, "has the value 'a', which is not of its `type`"),
        ({"const": True, "type": "integer"}, "has the value True, which is not of its `type`"),
        ({"enum": [1], "minimum": 1}, "has 'minimum' with `enum`"),
        ({"$ref": "http://x/y"}, "references begin with `#/`"),
        ({"$ref": "#/$defs/a"}, "has no '#/$defs/a', which it refers to"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "refers to itself"),
        ({"anyOf": [{"$id": "x", "$ref": "#/$defs/a"}], "$defs": {"a": INT}}, "has `$id` at /anyOf/0"),
        ({"\ud800": 1}, "has '\\ud800', which is not served"),
        ({"anyOf": [{"type": "array", "prefixItems": [{"enum": [*range(3000)]}] * 2}]}, "has more than 4096 values"),
        ({"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": INT}}, "has 'type' with `$ref`"),
    ],
)  # fmt: skip
def test_unsupported_keywords_are_refused_by_name(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(SchemaError) as error:
        library_schema(schema)
    assert words in str(error.value)


def test_references_that_multiply_are_refused() -> None:
    names = [f"d{index}" for index in range(12)]
    defs = {
        name: {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{after}"}] * 3} for name, after in pairwise(names)
    }
    with pytest.raises(SchemaError, match=f"has more than {MAX_NODES} schemas"):
        library_schema({"$ref": "#/$defs/d0", "$defs": defs | {names[-1]: INT}})


def test_a_deep_schema_is_refused_before_recursion() -> None:
    deep: dict[str, Any] = INT
    for _ in range(MAX_DEPTH + 1):
        deep = {"type": "array", "items": deep}
    chain: dict[str, Any] = {"$ref": "#/$defs/c0", "$defs": {}}
    for index in range(MAX_DEPTH):
        chain["$defs"][f"c{index}"] = {"allOf": [{"$ref": f"#/$defs/c{index + 1}"}]}
    for schema in (deep, chain):
        with pytest.raises(SchemaError, match=f"nested more than {MAX_DEPTH} levels deep"):
            library_schema(schema)
    assert library_schema({"type": "object", "properties": {"/" * 99: INT}})["properties"] == {"/" * 99: INT}


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        ({"title": "x", "description": "y", "x-order": 3, "type": "null"}, {"type": "null"}),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INT}}, INT),
        ({"allOf": [INT]}, INT),
        ({"type": ["integer", "null"]}, {"anyOf": [INT, {"type": "null"}]}),
        ({"type": "object", "additionalProperties": False}, {"type": "object", "properties": {}, "required": []}),
        ({"type": "string", "maxLength": 10**9}, {"type": "string", "minLength": 0, "maxLength": MAX_LENGTH}),
        ({"type": "string", "pattern": "^a|b$"}, {"type": "string", "pattern": "(a|b)"}),
        ({"type": "string", "pattern": r"a\\$"}, {"type": "string", "pattern": r"(a\\)"}),
        ({"type": "string", "pattern": r"a\$"}, {"type": "string", "pattern": r"(a\$)"}),
        ({"enum": [1.0, 2], "type": "integer"}, {"enum": [1.0, 2]}),
        ({"const": None}, {"enum": [None]}),
    ],
)
def test_a_schema_becomes_the_librarys_regex(schema: dict[str, Any], read: dict[str, Any]) -> None:
    assert library_schema(schema) == read
