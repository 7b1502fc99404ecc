"""Validated arguments of the harness' model `d1`. The harness itself passes them on unchecked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, create_model

from deploy.errors import UserError
from deploy.recipe.validation_errors import first_problem
from deploy.requests.parameters import SAMPLING_FIELDS, SAMPLING_KEYS

_OF_THE_HARNESS = frozenset({"batch_size", "max_batch_size", "trust_remote_code"})
"""Arguments that the harness adds, ignored: `slots` replaces its batch sizes, and no remote code is executed."""


class _HarnessArguments(BaseModel):
    """Arguments of the model `d1`: checkpoint, sampling fields and compute settings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    checkpoint: str
    """A run or checkpoint, as every command of d1 names them."""
    draws: PositiveInt = 128
    """Random masks for each likelihood."""
    slots: PositiveInt = 64
    """Batch size: completions, or canvases of a likelihood."""
    device: str | None = None
    """Device, in the harness' notation. Default: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights."""
    runs_dir: str = "runs"
    """Directory of the runs."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Validate the given arguments. Raises UserError for an unknown key or an invalid value."""
        try:
            return cls.model_validate({key: value for key, value in given.items() if key not in _OF_THE_HARNESS})
        except ValidationError as error:
            refusal, _ = first_problem(error, cls.model_json_schema(), "d1 model")
            raise UserError(f"--model_args: {refusal.sentence}") from error

    @property
    def sampling(self) -> dict[str, Any]:
        """The given sampling fields."""
        return self.model_dump(mode="json", include=set(_SAMPLING), exclude_none=True)


# The harness sets the temperature of each request (`--gen_kwargs`).
_SAMPLING = {name: SAMPLING_FIELDS[name] for name in SAMPLING_KEYS if name != "temperature"}

if TYPE_CHECKING:
    HarnessArguments = _HarnessArguments
else:
    _TYPES = {name: (field.ranged_type | None, None) for name, field in _SAMPLING.items()}
    HarnessArguments = create_model("HarnessArguments", __base__=_HarnessArguments, **_TYPES)
