"""Denoising parameters of a request: the `diffusion` object of a body, and keys of a sample line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from deploy.requests.base import MAX_INT32, RequestBody, is_id
from rollout.request import MAX_SEED, Schedule

MAX_CONSTRAINTS = 4096
"""Maximum forbidden token ids, and maximum fixed slots."""
Int64 = Annotated[int, Field(le=MAX_SEED, ge=-MAX_SEED)]
"""Integer that fits into an int64 tensor."""
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


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


class Diffusion(RequestBody):
    """Denoising parameters. Defaults are those of the run's evaluation, else d1's."""

    steps: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Denoise steps of the whole completion. DiffusionGemma: maximum steps of a canvas."""
    steps_per_block: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Denoise steps of each block, in place of `steps`. With `threshold`, a step commits at least its even share."""
    gen_length: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Slots of the completion, in tokens."""
    block_length: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Slots that are denoised together."""
    threshold: float | None = None
    """Probability above which a slot is committed. Selects the schedule `threshold`."""
    factor: float | None = None
    """Parameter of the schedule `factor`."""
    entropy_bound: float | None = None
    """Parameter of the schedule `entropy_bound`, in nats. DiffusionGemma: bounds the slots that a step keeps."""
    t_max: FiniteFloat | None = None
    """DiffusionGemma: temperature of a canvas' first step."""
    t_min: FiniteFloat | None = None
    """DiffusionGemma: temperature to which the steps of a canvas decrease."""
    stability_threshold: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    """DiffusionGemma: a canvas is finished when its most probable tokens were the same for this many steps before, and
    its entropy is below `confidence_threshold`."""
    confidence_threshold: FiniteFloat | None = None
    """DiffusionGemma: mean entropy of the slots, in nats, below which a stable canvas is finished."""
    remasking: Annotated[str, Field(max_length=32, json_schema_extra={"enum": [*Schedule]})] | None = None
    """Schedule that selects the slots to commit."""
    editing_threshold: float | None = None
    """Token editing of block-causal policies: a step also replaces tokens of its block if another token has more than
    this probability. Finished blocks do not change."""
    max_post_steps: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """With `editing_threshold`: maximum steps of a block after its last masked slot is filled."""
    cfg_scale: float | None = None
    """Scale of classifier-free guidance; 0 disables it."""
    constraints: Constraints = Constraints()
    stream: Literal["committed", "canvas"] = "committed"
    """What a stream shows: finished blocks, which are final, or the whole canvas after every step."""
    return_step_map: bool = False
    """Whether each choice includes the step and the confidence of each of its tokens."""


class SamplerKeys(RequestBody):
    """Additional keys of `d1 sample` lines: the sampler's own parameters, without the service's limits."""

    id: Any = None
    """Returned with the answer."""
    prompt_ids: list[Int64] | None = None
    """Token ids of the prompt; nothing is added."""
    fixed_tokens: dict[str, Int64] | None = None
    """Fixed tokens inside the completion: slot, counted from 0, to token id."""
    seed: Int64 | None = None
    gen_length: Int64 | None = None
    block_length: Int64 | None = None
    steps: Int64 | None = None
    steps_per_block: Int64 | None = None
    temperature: FiniteFloat | None = None
    cfg_scale: FiniteFloat | None = None
    schedule: str | None = None
    threshold: FiniteFloat | None = None
    factor: FiniteFloat | None = None
    entropy_bound: FiniteFloat | None = None
    editing_threshold: FiniteFloat | None = None
    max_post_steps: Int64 | None = None
    drawing: str | None = None
    top_p: FiniteFloat | None = None
    top_k: Int64 | None = None
    forbidden_ids: list[Int64] | None = None
    stop_ids: list[Int64] | None = None
    cache: str | None = None
    cache_refresh_steps: Int64 | None = None
