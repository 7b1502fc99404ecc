"""What the sampler is asked for and what it answers: token ids, never text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, model_validator


class SamplingParams(BaseModel):
    """How a completion is denoised. LLaDA's low-confidence order with semi-autoregressive blocks."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gen_length: PositiveInt = 256
    """Completion slots of the canvas, in tokens."""
    block_length: PositiveInt = 32
    """Slots denoised together; blocks are finished from left to right. Divides `gen_length`."""
    num_denoise_steps: PositiveInt = 128
    """Forwards for the whole completion; a multiple of the number of blocks. Each step commits an even share."""
    temperature: NonNegativeFloat = 0.9
    """Of the softmax that a committed token is drawn from; 0 takes the most probable token."""

    @model_validator(mode="after")
    def _blocks(self) -> SamplingParams:
        if self.gen_length % self.block_length:
            raise ValueError(
                f"block_length {self.block_length} does not divide gen_length {self.gen_length}; "
                f"take a divisor of {self.gen_length}"
            )
        if self.num_denoise_steps % self.num_blocks or self.num_denoise_steps > self.gen_length:
            raise ValueError(
                f"num_denoise_steps {self.num_denoise_steps} must be a multiple of the {self.num_blocks} blocks "
                f"and at most gen_length {self.gen_length}"
            )
        return self

    @property
    def num_blocks(self) -> int:
        """Blocks of the completion."""
        return self.gen_length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Denoise steps spent on each block."""
        return self.num_denoise_steps // self.num_blocks


class FinishReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    """[P] token ids, the chat template applied."""
    params: SamplingParams
    """How to denoise it."""
    seed: int
    """Keys every draw together with the denoise step and the slot: same seed and weights, same tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """One sampled completion with the record of how it came about.

    All arrays have length C, the slots that were denoised: whole blocks up to the one that holds the first end of
    text. What follows the end of text inside that block is kept, for in a bidirectional model it influenced what
    was committed after it; `num_tokens` says where the text ends.
    """

    token_ids: NDArray[np.int32]
    """[C] the committed tokens, the whole terminal block included."""
    num_tokens: int
    """Tokens up to and including the first end of text: what is graded and trained on."""
    step_map: NDArray[np.int16]
    """[C] the denoise step, counted over the completion from 0, at which a slot was committed."""
    commit_logp: NDArray[np.float32]
    """[C] log-probability, in nats, of the token under the tempered law it was drawn from (0 at temperature 0)."""
    commit_logp_raw: NDArray[np.float32]
    """[C] log-probability, in nats, of the token at temperature 1."""
    commit_entropy: NDArray[np.float32]
    """[C] entropy, in nats, of the untempered prediction at commit."""
    num_forwards: int
    """Forwards that this completion took part in."""
    exact: bool
    """Whether replaying (token_ids, step_map) through full forwards gives `commit_logp` back."""
    finish_reason: FinishReason
    """Why it ended."""
    policy_version: int
    """The policy version that sampled every token of it."""
