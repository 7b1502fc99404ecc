"""How a completion is denoised, as a body says it, and in the sampler's own words at the top level of a line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from deploy.requests.base import LARGEST, Body, is_id
from rollout.request import MAX_SEED, Schedule

MAX_CONSTRAINTS = 4096
"""Token ids that are forbidden, and slots that are given."""
Whole = Annotated[int, Field(le=MAX_SEED, ge=-MAX_SEED)]
"""What fits into a tensor of int64."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Constraints(Body):
    """What the policy must and must not write."""

    forbidden_ids: Annotated[list[int], Field(max_length=MAX_CONSTRAINTS)] = Field(default=[])
    """Token ids that are never committed."""
    fixed: Annotated[dict[str, int], Field(max_length=MAX_CONSTRAINTS)] = Field(default={})
    """Tokens that are given: slot of the completion, counted from 0, to token id."""

    @field_validator("fixed", mode="before")
    @classmethod
    def _fixed(cls, fixed: Any) -> Any:
        # pydantic would look at all of them, and name the field by what the client wrote.
        if not isinstance(fixed, dict) or len(fixed) > MAX_CONSTRAINTS or not all(map(is_id, fixed.values())):
            raise ValueError(f"must be at most {MAX_CONSTRAINTS} slots with a token id each")
        return fixed


class Diffusion(Body):
    """How a completion is denoised; what is left out is as the policy was trained."""

    steps: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Denoise steps of the whole completion; of a policy without a mask token (DiffusionGemma), of a canvas at most."""
    steps_per_block: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Or of each block; with `threshold`, a step then commits its share at least."""
    gen_length: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Slots of the completion, in tokens."""
    block_length: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Slots that are denoised together."""
    threshold: float | None = None
    """Probability above which a slot is committed; it names the schedule `threshold`."""
    factor: float | None = None
    """Of the schedule `factor`."""
    entropy_bound: float | None = None
    """Of the schedule `entropy_bound`, in nats; of DiffusionGemma, of what a step keeps."""
    t_max: Finite | None = None
    """Of DiffusionGemma, as the next three: temperature of a canvas' first step..."""
    t_min: Finite | None = None
    """...and what it falls to."""
    stability_threshold: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    """A canvas is finished when its most probable tokens were the same for so many steps before..."""
    confidence_threshold: Finite | None = None
    """...and its slots have less than so many nats of entropy, on average."""
    remasking: Annotated[str, Field(max_length=32, json_schema_extra={"enum": [*Schedule]})] | None = None
    """The schedule."""
    editing_threshold: float | None = None
    """Token editing, of block-causal policies: a step also replaces tokens of its block where another is more probable
    than this. What a stream of finished blocks shows stays."""
    max_post_steps: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """With it: steps of a block at most once no slot is masked."""
    cfg_scale: float | None = None
    """Classifier-free guidance; 0 is none."""
    constraints: Constraints = Constraints()
    stream: Literal["committed", "canvas"] = "committed"
    """What a stream shows: finished blocks, which stay; or the whole canvas again after every step."""
    return_step_map: bool = False
    """Whether each choice comes with the step and the confidence of each of its tokens."""


class Shorthand(Body):
    """Keys of `d1 sample` beside a body's: the sampler's own, in its own ranges, without a service's limits."""

    id: Any = None
    """Comes back with the answer."""
    prompt_ids: list[Whole] | None = None
    """Token ids, nothing added."""
    fixed_tokens: dict[str, Whole] | None = None
    """Tokens that are given inside the completion: slot, counted from 0, to token id."""
    seed: Whole | None = None
    gen_length: Whole | None = None
    block_length: Whole | None = None
    steps: Whole | None = None
    steps_per_block: Whole | None = None
    temperature: Finite | None = None
    cfg_scale: Finite | None = None
    schedule: str | None = None
    threshold: Finite | None = None
    factor: Finite | None = None
    entropy_bound: Finite | None = None
    editing_threshold: Finite | None = None
    max_post_steps: Whole | None = None
    drawing: str | None = None
    top_p: Finite | None = None
    top_k: Whole | None = None
    forbidden_ids: list[Whole] | None = None
    stop_ids: list[Whole] | None = None
    cache: str | None = None
    cache_refresh_steps: Whole | None = None
