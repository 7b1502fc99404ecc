"""Sampling fields: one declaration, from which request bodies, request lines and settings of the command line derive.

Type, range, default and description of a field are those of the samplers' own models: `SamplingParams`, which is also
`rollout.sampling` of a recipe, and `RenoisingParams`. Requests use the same names, except the shorter `steps`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema, create_model, field_validator
from pydantic.fields import FieldInfo

from deploy.requests.base import MAX_INT32, RequestBody, is_id
from rollout.renoising.request import RenoisingParams
from rollout.request import MAX_SEED, SamplingParams

Values = Mapping[str, Any]
"""Values of sampling fields by their names in requests."""

Int64 = Annotated[int, Field(le=MAX_SEED, ge=-MAX_SEED)]
"""Integer that fits into an int64 tensor."""
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
_BODY_INT = Annotated[int, Field(le=MAX_INT32, ge=-MAX_INT32)]

# The names of the samplers' models that differ in requests.
_STEPS = {"num_denoise_steps": "steps", "max_denoise_steps": "steps"}
# Fields that are not in a body's `diffusion` object under their own name.
_PLACES: dict[str, str | None] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_ids": "stop_token_ids",
    "forbidden_ids": "diffusion.constraints.forbidden_ids",
    "schedule": "diffusion.remasking",
    "drawing": None,
    "cache": None,
    "cache_refresh_steps": None,
}
_OWN_PLACE = "diffusion."


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingField:
    """Sampling field as requests and the command line have it."""

    name: str
    """Name in a request line and on the command line."""
    place: str | None
    """Path in a request body; None: the service does not offer it."""
    masked: FieldInfo | None
    """Declaration for policies with a mask token; None: not for these."""
    renoising: FieldInfo | None
    """Declaration for policies without one; None: not for these."""

    @property
    def declared(self) -> FieldInfo:
        """Declaration for policies with a mask token, or else of the others."""
        found = self.masked or self.renoising
        assert found is not None, "it is in one of the models"
        return found

    @property
    def about(self) -> str:
        """Description, with the names of requests."""
        texts = [self.masked.description or ""] if self.masked else []
        texts += [f"DiffusionGemma: {self.renoising.description}"] if self.renoising else []
        return re.sub(r"`(\w+)`", lambda found: f"`{_STEPS.get(found[1], found[1])}`", "\n".join(texts))

    @property
    def line_type(self) -> Any:
        """Type in a request line, without the range: the planner checks it, once defaults and options are applied."""
        kind = _plain_type(self.declared.annotation)
        if kind is int or kind is float:
            return Int64 if kind is int else FiniteFloat
        return str if isinstance(kind, type) and issubclass(kind, StrEnum) else list[Int64]

    @property
    def ranged_type(self) -> Any:
        """Declared type with its range."""
        declared: Any = self.declared.annotation
        for constraint in self.declared.metadata:
            declared = Annotated[declared, constraint]
        return declared

    @property
    def body_type(self) -> Any:
        """Type in a request body: as in a line, and an integer has 32 bits. The OpenAPI schema shows the range."""
        schema = TypeAdapter(self.ranged_type).json_schema()
        shown = next((one for one in schema.get("anyOf", ()) if one["type"] != "null"), schema)
        shown = {key: value for key, value in shown.items() if key not in ("title", "description")}
        if self.line_type is Int64:
            return Annotated[_BODY_INT, WithJsonSchema({"maximum": MAX_INT32} | shown)]
        return Annotated[self.line_type, WithJsonSchema(shown)]


def _plain_type(annotation: Any) -> Any:
    """Return a type without None and constraints."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(one for one in get_args(annotation) if one is not NoneType)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _declared(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {_STEPS.get(name, name): field for name, field in model.model_fields.items()}


_MASKED, _RENOISING = _declared(SamplingParams), _declared(RenoisingParams)
SAMPLING_FIELDS = {
    name: SamplingField(
        name=name,
        place=_PLACES.get(name, f"{_OWN_PLACE}{name}"),
        masked=_MASKED.get(name),
        renoising=_RENOISING.get(name),
    )
    for name in _MASKED | _RENOISING
}
"""All sampling fields by name, in the order of the samplers' models."""
SAMPLING_KEYS = tuple(_MASKED)
"""Names of the fields of policies with a mask token."""
RENOISING_KEYS = (*_RENOISING, "stop_ids")
"""Names of the fields of policies without one. `stop_ids` is a field of their requests, not of `RenoisingParams`."""
SETTINGS = ("seed", *SAMPLING_FIELDS)
"""Keys of the settings `KEY=VALUE` on the command line."""
DIFFUSION_FIELDS = {
    field.place.removeprefix(_OWN_PLACE): field
    for field in SAMPLING_FIELDS.values()
    if field.place is not None and field.place.count(".") == 1
}
"""Fields of the `diffusion` object of a body, by their names in it."""


def to_params(values: Values) -> SamplingParams:
    """Convert values to `SamplingParams`. Raises ValidationError if they are invalid."""
    return SamplingParams.model_validate(_by_own_names(SamplingParams, values))


def to_renoising_params(values: Values) -> RenoisingParams:
    """Convert values to `RenoisingParams`. Raises ValidationError if they are invalid."""
    return RenoisingParams.model_validate(_by_own_names(RenoisingParams, values))


def _by_own_names(model: type[BaseModel], values: Values) -> dict[str, Any]:
    own = {_STEPS.get(name, name): name for name in model.model_fields}
    return {own.get(name, name): value for name, value in values.items()}


def values_of(params: SamplingParams) -> dict[str, Any]:
    """Return the values of `params` by their names in requests, without unset ones."""
    values = params.model_dump(mode="json", exclude_none=True)
    return {_STEPS.get(name, name): value for name, value in values.items()}


def sampler_names(names: Mapping[str, str]) -> dict[str, str]:
    """Extend a map of display names to the samplers' own names of the step count."""
    return {**names, **dict.fromkeys(_STEPS, names.get("steps", "steps"))}


MAX_CONSTRAINTS = 4096
"""Maximum forbidden token ids, and maximum fixed slots."""


class Constraints(RequestBody):
    """Constraints on the completion: forbidden tokens and fixed tokens."""

    forbidden_ids: Annotated[list[int], Field(max_length=MAX_CONSTRAINTS)] = Field(default=[])
    """Token ids that are never committed."""
    fixed: Annotated[dict[str, int], Field(max_length=MAX_CONSTRAINTS)] = Field(default={})
    """Fixed tokens: slot of the completion, counted from 0, to token id."""

    @field_validator("fixed", mode="before")
    @classmethod
    def _fixed(cls, fixed: Any) -> Any:
        # pydantic would check every item, and put the client's key into the field name.
        if not isinstance(fixed, dict) or len(fixed) > MAX_CONSTRAINTS or not all(map(is_id, fixed.values())):
            raise ValueError(f"must be at most {MAX_CONSTRAINTS} slots with a token id each")
        return fixed


class _Diffusion(RequestBody):
    """Denoising parameters. Defaults are those of the run's evaluation, else d1's."""

    constraints: Constraints = Constraints()
    stream: Literal["committed", "canvas"] = "committed"
    """What a stream shows: finished blocks, which are final, or the whole canvas after every step."""
    return_step_map: bool = False
    """Whether each choice includes the step and the confidence of each of its tokens."""


class _SamplerKeys(RequestBody):
    """Additional keys of `d1 sample` lines: the sampler's own parameters, without the service's limits."""

    id: Any = None
    """Returned with the answer."""
    prompt_ids: list[Int64] | None = None
    """Token ids of the prompt; nothing is added."""
    fixed_tokens: dict[str, Int64] | None = None
    """Fixed tokens inside the completion: slot, counted from 0, to token id."""
    seed: Int64 | None = None


if TYPE_CHECKING:
    Diffusion = _Diffusion
    SamplerKeys = _SamplerKeys
else:
    _IN_BODY = {
        name: (field.body_type | None, Field(default=None, description=field.about))
        for name, field in DIFFUSION_FIELDS.items()
    }
    _IN_LINE = {name: (field.line_type | None, None) for name, field in SAMPLING_FIELDS.items()}
    Diffusion = create_model("Diffusion", __base__=_Diffusion, __doc__=_Diffusion.__doc__, **_IN_BODY)
    SamplerKeys = create_model("SamplerKeys", __base__=_SamplerKeys, **_IN_LINE)
