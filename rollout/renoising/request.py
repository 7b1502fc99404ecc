"""Request, sampling parameters and completion of the renoising sampler: token ids, never text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from learner.model.renoising.config import RenoisingConfig
from learner.model.renoising.record import DenoisedCanvas
from rollout.field_error import FieldError
from rollout.request import Committed, FinishReason
from rollout.request_checks import check_ids, check_seed

# Logits divided by much less overflow float32.
_MIN_TEMPERATURE = 1e-5


class RenoisingParams(BaseModel):
    """Sampling parameters of renoising, which goes canvas by canvas. The defaults are DiffusionGemma's."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gen_length: PositiveInt = 256
    """Maximum tokens of the completion; whole canvases are denoised."""
    max_denoise_steps: PositiveInt = 48
    """Maximum denoise steps of a canvas."""
    entropy_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """A step keeps the least uncertain slots, as long as their entropies, without the largest, sum to at most so many
    nats (arXiv 2505.24857, section 3)."""
    t_max: Annotated[float, Field(ge=_MIN_TEMPERATURE, le=1000)] = 0.8
    """Temperature of a canvas' first step."""
    t_min: Annotated[float, Field(ge=_MIN_TEMPERATURE, le=1000)] = 0.4
    """Temperature that a canvas would reach after `max_denoise_steps`, falling linearly."""
    stability_threshold: NonNegativeInt = 1
    """A canvas can finish when its most probable tokens are the same as in this many steps before."""
    confidence_threshold: Annotated[float, Field(ge=0)] = 0.005
    """It then finishes if the mean entropy of its slots is below this many nats."""

    @model_validator(mode="after")
    def _falls(self) -> RenoisingParams:
        if self.t_min > self.t_max:
            raise FieldError("{t_min} {low:g} is above {t_max} {high:g}", low=self.t_min, high=self.t_max)
        return self

    @property
    def schedule_name(self) -> str:
        """Label of the schedule in tables: `48 steps a canvas, entropy bound 0.1`."""
        num_steps = self.max_denoise_steps
        return f"{num_steps} step{'s' if num_steps > 1 else ''} a canvas, entropy bound {self.entropy_bound:g}"

    def temperature(self, step: int) -> float:
        """Return the temperature of a canvas' denoise step, counted from 0."""
        left = self.max_denoise_steps - step
        return self.t_min + (self.t_max - self.t_min) * left / self.max_denoise_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RenoisingRequest:
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    """[P] token ids, the chat template applied."""
    params: RenoisingParams
    """How to denoise it."""
    seed: int
    """Keys every random draw together with the canvas, the step and the slot."""
    stop_ids: tuple[int, ...] | None = None
    """Ids that end a completion, by default the policy's."""
    committed: Committed | None = None
    """Canvases that were finished before the same request was interrupted; None begins at the first. The rest is the
    same as without the interruption: a draw depends on canvas, step and slot, and a canvas begins without the state of
    earlier steps."""

    def num_slots(self, canvas_length: int) -> int:
        """Return the slots of a completion without an end of text: those of whole canvases."""
        return -(-self.params.gen_length // canvas_length) * canvas_length


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RenoisedCompletion:
    """One sampled completion with the trajectory of each canvas."""

    token_ids: NDArray[np.int32]
    """[L] whole canvases; padding after an end of text."""
    num_tokens: int
    """Tokens up to and including the first end of text, `gen_length` at most."""
    canvases: tuple[DenoisedCanvas, ...]
    """Trajectories of the canvases that were denoised for this request, without restored ones."""
    finish_reason: FinishReason
    """Why it ended."""
    policy_version: int
    """The policy version that sampled it."""

    @property
    def num_forwards(self) -> int:
        """Forwards of the decoder."""
        return sum(canvas.num_steps for canvas in self.canvases)


def check_renoising_request(request: RenoisingRequest, config: RenoisingConfig) -> None:
    """Raise ValueError, for a field's value FieldError, if the policy cannot serve this request."""
    if not request.prompt_ids:
        raise FieldError("{prompt_ids} is empty; a completion needs at least one token before it")
    check_ids("prompt_ids", request.prompt_ids, config.vocab_size)
    check_ids("stop_ids", request.stop_ids or (), config.vocab_size)
    num_slots = request.num_slots(config.canvas_length)
    num_given, num_asked = len(request.prompt_ids), request.params.gen_length
    end = num_given + num_slots
    if end > config.max_sequence_length:
        raise FieldError(
            f"{{prompt_ids}} of {num_given} and {{gen_length}} {num_asked} in canvases of {config.canvas_length} make "
            f"{end} tokens; the policy takes at most {config.max_sequence_length}"
        )
    check_seed(request.seed)
    if request.committed is not None:
        _check_committed(request.committed, num_slots, config)


def _check_committed(committed: Committed, num_slots: int, config: RenoisingConfig) -> None:
    if len(committed) % config.canvas_length or len(committed) >= num_slots:
        raise ValueError(
            f"committed has {len(committed)} slots; finished canvases are multiples of {config.canvas_length} below "
            f"{num_slots}"
        )
    check_ids("committed", committed.token_ids.tolist(), config.vocab_size)
