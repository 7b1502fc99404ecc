"""Why a request cannot be served: one sentence, in the names that its author wrote."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError

from deploy.recipe.refusals import first_refusal
from rollout.field_error import FieldError


class RequestError(Exception):
    """A request that cannot be served, in one sentence without its full stop."""

    def __init__(self, sentence: str, code: str = "invalid_value", *, param: str | None = None) -> None:
        """Keep the sentence, OpenAI's code for what is wrong, and the field."""
        super().__init__(sentence)
        self.code, self.param = code, param


def refusal_of(
    error: FieldError | ValidationError, model: type[BaseModel], names: Mapping[str, str] | None = None
) -> RequestError:
    """What is wrong with a request's fields, each by the name that `names` has for it, else by its own."""
    names = names or {}
    if isinstance(error, FieldError):
        return RequestError(error.named(names), param=names.get(error.fields[0]))
    cause = error.errors()[0].get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return refusal_of(cause, model, names)
    refusal, _ = first_refusal(error, _schema_of(model), "request")
    field = refusal.key.partition(".")[0].partition("[")[0]
    return RequestError(names.get(field, field) + refusal.sentence.removeprefix(field), param=names.get(field))


TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError)
"""What comes of a conversation that a chat template does not take, of a variable that its expressions do not, and of a
tokenizer without one."""


def template_refusal(error: Exception) -> str:
    """What a chat template says of a conversation that it does not take, without the advice that some add."""
    return str(error).partition("\n")[0].partition("! ")[0]


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    # Milliseconds, and a file may have many lines that are refused.
    return model.model_json_schema()
