"""Several sampling schedules in a recipe: those of the training groups, and those of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from rollout.request import SCHEDULE_PARAMETER, SamplingParams, Schedule

_NAMES = ("schedule", *SCHEDULE_PARAMETER.values())
_STEPS_OF_BLOCK = "steps_per_block"


class ScheduleConfig(BaseModel):
    """A schedule that replaces the one of `rollout.sampling`: how many slots a denoise step commits, and which."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_denoise_steps: PositiveInt | None = None
    """As `rollout.sampling.num_denoise_steps`; the other fields likewise."""
    steps_per_block: PositiveInt | None = None
    """As in `rollout.sampling`."""
    schedule: Schedule | None = None
    """As in `rollout.sampling`."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """As in `rollout.sampling`."""
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """As in `rollout.sampling`."""
    entropy_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """As in `rollout.sampling`."""

    def of(self, sampling: SamplingParams) -> SamplingParams:
        """Return `sampling` with this schedule. A number of steps alone keeps a schedule of even shares.

        Raises ValueError if the two do not fit.
        """
        given = self.model_dump(exclude_none=True)
        kept: dict[str, Any] = sampling.model_dump()
        if given.keys() & set(_NAMES) or not sampling.has_even_shares:
            kept = {name: value for name, value in kept.items() if name not in _NAMES}
        kept.pop(_STEPS_OF_BLOCK)
        try:
            return SamplingParams(**kept | given)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def with_schedules(sampling: SamplingParams, schedules: Sequence[ScheduleConfig] | None) -> tuple[SamplingParams, ...]:
    """Return the parameters with each of some schedules, or unchanged if `schedules` is None.

    Raises ValueError if the list is empty, or, with its index, if a schedule does not fit.
    """
    if schedules is None:
        return (sampling,)
    if not schedules:
        raise ValueError("schedules is empty; name one, or leave it out for that of rollout.sampling")
    found = []
    for index, schedule in enumerate(schedules):
        try:
            found.append(schedule.of(sampling))
        except ValueError as error:
            raise ValueError(f"schedules[{index}]: {error}") from None
    return tuple(found)
