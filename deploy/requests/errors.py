"""Request errors: one sentence that names fields as the user wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError

from deploy.recipe.validation_errors import first_problem
from rollout.field_error import FieldError


class RequestError(Exception):
    """Error for a request that cannot be served: one sentence without a full stop."""

    def __init__(self, sentence: str, code: str = "invalid_value", *, param: str | None = None) -> None:
        """Store the sentence, OpenAI's error code and the field."""
        super().__init__(sentence)
        self.code, self.param = code, param


def request_error_of(
    error: FieldError | ValidationError, model: type[BaseModel], names: Mapping[str, str] | None = None
) -> RequestError:
    """Convert a validation error to a RequestError. Fields have their name in `names`, else their own."""
    names = names or {}
    if isinstance(error, FieldError):
        return RequestError(error.named(names), param=names.get(error.fields[0]))
    cause = error.errors()[0].get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return request_error_of(cause, model, names)
    problem, _ = first_problem(error, _schema_of(model), "request")
    field = problem.key.partition(".")[0].partition("[")[0]
    return RequestError(names.get(field, field) + problem.sentence.removeprefix(field), param=names.get(field))


TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError)
"""Errors for a conversation or a variable that the chat template rejects, and for a tokenizer without a template."""


def template_error_text(error: Exception) -> str:
    """Return the error message of a chat template, without the advice that some templates append."""
    return str(error).partition("\n")[0].partition("! ")[0]


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    # Building a schema takes milliseconds, and a file may have many invalid lines.
    return model.model_json_schema()
