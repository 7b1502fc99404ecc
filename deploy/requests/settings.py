"""Settings `KEY=VALUE` of the command line: sampling fields by their names in requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from deploy.errors import UserError, user_errors
from deploy.recipe.overrides import parse_override
from deploy.recipe.validation_errors import shortened
from deploy.requests.errors import RequestError, request_error_of
from deploy.requests.line import read_line
from deploy.requests.parameters import SAMPLING_FIELDS, SETTINGS, Values, sampler_names, to_params, to_renoising_params
from rollout.field_error import FieldError
from rollout.renoising.request import RenoisingParams
from rollout.request import SamplingParams
from rollout.request_checks import check_seed


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse settings `KEY=VALUE`. Raises UserError for a word of another form, an unknown key or an invalid value."""
    values = {}
    for word in words:
        key, separator, _ = word.partition("=")
        if not separator:
            raise UserError(
                f"{shortened(repr(word))} should have the form KEY=VALUE, such as steps=9, after the prompt"
            )
        if key not in SETTINGS:
            guess = get_close_matches(key, SETTINGS, n=1)
            rest = f"did you mean {guess[0]}?" if guess else f"the settings are {', '.join(SETTINGS)}"
            raise UserError(f"there is no setting {shortened(key)}; {rest}")
        values[key] = parse_override(word)[1]
        if values[key] is None:
            raise UserError(f"{key} has no value; leave it out, or write one, such as {key}=9")
    _check(values)
    return values


def _check(values: Values) -> None:
    """Raise UserError for a setting whose value is invalid with any request."""
    with user_errors(RequestError, FieldError):
        given = read_line({"prompt_ids": [0], **values}).sampler_values
        check_seed(values.get("seed", 0))
        masked = {key: value for key, value in given.items() if SAMPLING_FIELDS[key].masked}
        others = {key: value for key, value in given.items() if key not in masked}
        _check_ranges(SamplingParams, lambda: to_params(masked))
        _check_ranges(RenoisingParams, lambda: to_renoising_params(others))


def _check_ranges(model: type[BaseModel], make: Callable[[], object]) -> None:
    try:
        make()
    except ValidationError as error:
        # Settings that conflict with each other here may be consistent with a request.
        if not isinstance(error.errors()[0].get("ctx", {}).get("error"), FieldError):
            raise request_error_of(error, model, sampler_names({})) from error
