"""Schedules in place of one: those that groups are trained at, and those that a policy is evaluated at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from rollout.request import PARAMETER_OF, SamplingParams, Schedule

_NAMES = ("schedule", *PARAMETER_OF.values())
_STEPS_OF_BLOCK = "steps_per_block"


class ScheduleConfig(BaseModel):
    """How many slots a denoise step commits, and which, in place of what `rollout.sampling` says of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_denoise_steps: PositiveInt | None = None
    """As `rollout.sampling.num_denoise_steps`, and so are the rest."""
    steps_per_block: PositiveInt | None = None
    """As there."""
    schedule: Schedule | None = None
    """As there."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """As there."""
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """As there."""
    entropy_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """As there."""

    def of(self, sampling: SamplingParams) -> SamplingParams:
        """Those parameters with this schedule. Steps alone leave a schedule by shares what it is.

        Raises ValueError where the two do not fit.
        """
        given = self.model_dump(exclude_none=True)
        kept: dict[str, Any] = sampling.model_dump()
        if given.keys() & set(_NAMES) or not sampling.is_by_shares:
            kept = {name: value for name, value in kept.items() if name not in _NAMES}
        kept.pop(_STEPS_OF_BLOCK)
        try:
            return SamplingParams(**kept | given)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def with_schedules(sampling: SamplingParams, schedules: Sequence[ScheduleConfig] | None) -> tuple[SamplingParams, ...]:
    """The parameters with each of some schedules; as they are without.

    Raises ValueError where there is none, or, naming it by its place, where one does not fit.
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
