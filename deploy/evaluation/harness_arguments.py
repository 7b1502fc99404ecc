"""What the harness' model `d1` takes, checked: the harness hands on whatever it was given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from deploy.errors import UserError
from deploy.recipe.refusals import first_refusal

_OF_THE_HARNESS = frozenset({"batch_size", "max_batch_size", "trust_remote_code"})
"""What it says of its own accord: `slots` takes the place of its batch sizes, and nothing remote is executed."""


class HarnessArguments(BaseModel):
    """How a checkpoint is asked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    checkpoint: str
    """A run or checkpoint, as every command of d1 names them."""
    length: PositiveInt | None = None
    """Slots of a completion; None: as the run has, or of a checkpoint by itself as many as the task asks for, in whole
    blocks."""
    block_length: PositiveInt | None = None
    """Slots that are denoised together; None: as the run has, or 32."""
    steps: PositiveInt | None = None
    """Denoise steps; None: as the run is evaluated, or half as many as slots."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Commit what is at least so probable, in place of steps."""
    draws: PositiveInt = 128
    """Masks of each likelihood."""
    slots: PositiveInt = 64
    """Completions, or canvases of a likelihood, at a time."""
    device: str | None = None
    """Where it computes, as the harness says it: a GPU by default, if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""
    runs_dir: str = "runs"
    """Where the runs are."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> HarnessArguments:
        """What is given, by its key. Raises UserError for a key that there is not, and a value that is none."""
        try:
            return cls.model_validate({key: value for key, value in given.items() if key not in _OF_THE_HARNESS})
        except ValidationError as error:
            refusal, _ = first_refusal(error, cls.model_json_schema(), "d1 model")
            raise UserError(f"--model_args: {refusal.sentence}") from error

    @property
    def shape(self) -> dict[str, Any]:
        """What is given of how completions are denoised, by the sampler's keys."""
        said = {
            "gen_length": self.length,
            "block_length": self.block_length,
            "steps": self.steps,
            "threshold": self.threshold,
        }
        return {key: value for key, value in said.items() if value is not None}
