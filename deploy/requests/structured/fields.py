"""The fields of a body that say what its text must be: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from deploy.requests.base import Body, whole
from deploy.requests.refusals import RequestError
from deploy.requests.structured.byte_automaton import MAX_TEXT
from deploy.requests.structured.schema import MAX_DEPTH
from deploy.requests.structured.structure import Structure

MAX_CHOICES = 256
MAX_CHOICE_LENGTH = 1024
_ANY_OBJECT = {"type": "object"}

_Kind = Literal["text", "json_object", "json_schema"]
_Name = Annotated[str, Field(max_length=256)]


def _shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema. Raises ValueError where what recurses into it would not come back."""
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


_Schema = Annotated[dict[str, Any], AfterValidator(_shallow)]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_LENGTH), AfterValidator(whole)]


class JsonSchema(Body):
    """A schema with a name, as `response_format` has it."""

    place = "response_format.json_schema."

    name: _Name | None = None
    description: str | None = None
    """This and the name are taken and not used."""
    json_schema: Annotated[_Schema, Field(alias="schema")]
    strict: bool | None = None
    """Every answer is strict."""


class ResponseFormat(Body):
    """OpenAI's."""

    place = "response_format."

    type: _Kind
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        _expect_schema(self.type, self.json_schema, "json_schema", "response_format")
        return self

    @property
    def structure(self) -> Structure | None:
        """What the text must be; None for any text."""
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return _structure_of(self.type, schema, "response_format")


class TextFormat(Body):
    """`text.format` of `/v1/responses`: the same in one object."""

    place = "text.format."

    type: _Kind
    name: _Name | None = None
    description: str | None = None
    json_schema: Annotated[_Schema | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        _expect_schema(self.type, self.json_schema, "schema", "text.format")
        return self


class TextOptions(Body):
    """`text` of `/v1/responses`."""

    unsupported: ClassVar = {"verbosity": ()}
    place = "text."

    format: TextFormat | None = None

    @property
    def structure(self) -> Structure | None:
        """What the text must be; None for any text."""
        return None if self.format is None else _structure_of(self.format.type, self.format.json_schema, "text")


def _expect_schema(kind: _Kind, schema: object, key: str, field: str) -> None:
    if (schema is not None) != (kind == "json_schema"):
        message = f"`{field}` has a `{key}` where its `type` is `json_schema`, and only there"
        raise RequestError(message, param=field.partition(".")[0])


def _structure_of(kind: _Kind, schema: dict[str, Any] | None, field: str) -> Structure | None:
    return None if kind == "text" else Structure.of_schema(_ANY_OBJECT if schema is None else schema, field)


class StructuredOutputs(Body):
    """vLLM's: one of these."""

    unsupported: ClassVar = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "grammar": (),
        "structural_tag": (),
        "whitespace_pattern": (),
    }
    place = "structured_outputs."

    json_schema: Annotated[_Schema | None, Field(alias="json")] = None
    """A JSON schema."""
    json_object: bool = False
    """Any object of JSON."""
    regex: Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(whole)] | None = None
    """A regular expression that the whole text matches, without anchors or lookaround."""
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """Texts, of which it is one."""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum([self.json_schema is not None, self.json_object, bool(self.regex), bool(self.choice)]) != 1:
            message = "`structured_outputs` has one of `json`, `json_object`, `regex` and `choice`"
            raise RequestError(message, param="structured_outputs")
        return self

    @property
    def structure(self) -> Structure:
        """What the text must be."""
        field = "structured_outputs"
        if self.regex is not None:
            return Structure(kind="regex", text=self.regex, field=field)
        if self.choice is not None:
            return Structure.of_choices(self.choice, field)
        return Structure.of_schema(_ANY_OBJECT if self.json_schema is None else self.json_schema, field)
