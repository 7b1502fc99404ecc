"""Validated arguments of the harness' model `d1`. The harness itself passes them on unchecked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from deploy.errors import UserError
from deploy.recipe.validation_errors import first_problem

_OF_THE_HARNESS = frozenset({"batch_size", "max_batch_size", "trust_remote_code"})
"""Arguments that the harness adds, ignored: `slots` replaces its batch sizes, and no remote code is executed."""


class HarnessArguments(BaseModel):
    """Arguments of the model `d1`: checkpoint, sampling and compute settings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    checkpoint: str
    """A run or checkpoint, as every command of d1 names them."""
    length: PositiveInt | None = None
    """Completion slots; None: as in the run, or without a run as many whole blocks as the task needs."""
    block_length: PositiveInt | None = None
    """Slots that are denoised together; None: as in the run, or 32."""
    steps: PositiveInt | None = None
    """Denoise steps; None: as in the run's evaluation, or half as many as slots."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Commit slots above this probability, in place of a fixed number of steps."""
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
    def of(cls, given: dict[str, Any]) -> HarnessArguments:
        """Validate the given arguments. Raises UserError for an unknown key or an invalid value."""
        try:
            return cls.model_validate({key: value for key, value in given.items() if key not in _OF_THE_HARNESS})
        except ValidationError as error:
            refusal, _ = first_problem(error, cls.model_json_schema(), "d1 model")
            raise UserError(f"--model_args: {refusal.sentence}") from error

    @property
    def shape(self) -> dict[str, Any]:
        """The given denoising parameters, by the sampler's keys."""
        said = {
            "gen_length": self.length,
            "block_length": self.block_length,
            "steps": self.steps,
            "threshold": self.threshold,
        }
        return {key: value for key, value in said.items() if value is not None}
