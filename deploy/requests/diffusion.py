"""Sampling fields of a request: the `diffusion` object of a body, and keys of a sample line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, field_validator

from deploy.requests.base import RequestBody, is_id
from deploy.requests.parameters import DIFFUSION_FIELDS, SAMPLING_FIELDS, Int64

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
