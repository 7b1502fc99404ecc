"""Structured output fields of a body: OpenAI's `response_format`, and those of vLLM and SGLang."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from deploy.requests.base import RequestBody, valid_text
from deploy.requests.errors import RequestError
from deploy.requests.structured.byte_automaton import MAX_TEXT
from deploy.requests.structured.schema import MAX_DEPTH
from deploy.requests.structured.structure import Structure

MAX_CHOICES = 256
MAX_CHOICE_LENGTH = 1024
_ANY_OBJECT = {"type": "object"}


def _shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema. Raises ValueError if it is nested too deeply for recursive code."""
    level: list[Any] = [schema]
    for _ in range(2 * MAX_DEPTH):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError(f"is nested more than {2 * MAX_DEPTH} levels deep")
    return schema


def _object(schema: Any) -> Any:
    """Parse a schema that is given as text, which vLLM and SGLang accept too."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError("must be a JSON schema, as an object or as its text") from error


_Schema = Annotated[dict[str, Any], AfterValidator(_shallow), BeforeValidator(_object)]
_Regex = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(valid_text)]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_LENGTH), AfterValidator(valid_text)]
_Choices = Annotated[list[_Choice], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchema(RequestBody):
    """Named JSON schema of `response_format`."""

    field_prefix = "response_format.json_schema."

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    """Accepted and not used, like the name."""
    json_schema: Annotated[_Schema, Field(alias="schema")]
    strict: bool | None = None
    """Not used: every answer is strict."""


class ResponseFormat(RequestBody):
    """OpenAI's `response_format`."""

    field_prefix = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    bare_schema: Annotated[_Schema | None, Field(alias="schema")] = None
    """Schema without a name, as in SGLang."""

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self._schema is not None) != (self.type == "json_schema"):
            message = "`response_format` has a `json_schema` where its `type` is `json_schema`, and only there"
            raise RequestError(message, param="response_format")
        return self

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """JSON schema of the text; None: unconstrained."""
        return _ANY_OBJECT if self.type == "json_object" else self._schema

    @property
    def _schema(self) -> dict[str, Any] | None:
        return self.bare_schema if self.json_schema is None else self.json_schema.json_schema


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    ignored_values: ClassVar = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "disable_fallback": None,
        "grammar": (),
        "structural_tag": (),
        "whitespace_pattern": (),
    }
    field_prefix = "structured_outputs."

    json_schema: Annotated[_Schema | None, Field(alias="json")] = None
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: _Regex | None = None
    """A regular expression that the whole text matches, without anchors or lookaround."""
    choice: _Choices | None = None
    """Allowed texts."""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum([self.json_schema is not None, self.json_object, bool(self.regex), bool(self.choice)]) != 1:
            message = "`structured_outputs` has one of `json`, `json_object`, `regex` and `choice`"
            raise RequestError(message, param="structured_outputs")
        return self


class Structured(RequestBody):
    """Structured output fields of a request; at most one is set."""

    response_format: ResponseFormat | None = None
    """JSON that matches a schema, or any JSON object. Guaranteed under every schedule."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's equivalent, with regular expressions and choices too."""
    schema_text: Annotated[_Schema | None, Field(alias="json_schema")] = None
    """Same as `structured_outputs.json`. This and the next are SGLang's names."""
    regex: _Regex | None = None

    @cached_property
    def _structures(self) -> list[Structure]:
        outputs = self.structured_outputs or StructuredOutputs.model_construct()
        asked = "structured_outputs"
        schemas: tuple[tuple[str, Any], ...] = (
            ("response_format", self.response_format and self.response_format.text_schema),
            (asked, _ANY_OBJECT if outputs.json_object else outputs.json_schema),
            ("json_schema", self.schema_text),
        )
        found = [Structure.of_schema(schema, field) for field, schema in schemas if schema is not None]
        regexes = (asked, outputs.regex), ("regex", self.regex)
        found += [Structure(kind="regex", text=regex, field=field) for field, regex in regexes if regex is not None]
        return found + ([] if outputs.choice is None else [Structure.of_choices(outputs.choice, asked)])

    @property
    def structure(self) -> Structure | None:
        """Structure of the text; None: unconstrained."""
        return next(iter(self._structures), None)
