"""A loaded policy version, and the check of its weights before it serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from actors.registry.records import PolicyVersion
from deploy.requests.families import AnyConfig, AnyRequest
from learner.model.renoising.config import RenoisingConfig
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.renoising.sampler import AnySampler
from rollout.request import Completion, Progress, Request, SamplingParams


class Batch(Protocol):
    """Batch of a version, stepped explicitly: a `SlotBatch` or a `RenoisingBatch`."""

    @property
    def num_running(self) -> int:
        """Number of rows that are being denoised."""

    def submit(self, request: Any, /) -> int:
        """Queue a request of the sampler's kind for a row. Returns its index."""

    def cancel(self, index: int, /) -> None:
        """Cancel a request."""

    def num_committed(self) -> dict[int, int]:
        """Return the number of slots in finished blocks, for each request with a row."""

    def progress(self, indices: Sequence[int], /) -> dict[int, Progress]:
        """Return the progress of some requests, except those without a row."""

    def step(self) -> list[tuple[int, Completion]]:
        """Denoise all rows for one step. Returns the finished completions with their indices."""


class NoSuchVersionError(LookupError):
    """There is no such version, or its weights are missing."""


class RefusedVersionError(ValueError):
    """The version failed a check, so it must not serve."""


class NoRoomError(Exception):
    """Every version in memory is in use. Trying again later may succeed."""


class LoadedVersion:
    """Policy version in memory."""

    def __init__(self, sampler: AnySampler, policy: PolicyVersion) -> None:
        self.sampler, self.policy = sampler, policy
        self.batch: Batch | None = None
        """Its rows; only the engine's thread uses it."""
        self.num_jobs = 0
        self.used_at_s = time.monotonic()

    @property
    def config(self) -> AnyConfig:
        """Model config of the policy."""
        return self.sampler.model.config


@torch.inference_mode()
def finite_probe(sampler: AnySampler, policy: PolicyVersion) -> str | None:
    """Check that weights and predictions are finite, by two denoise steps, which also warm up the network.

    Returns the reason if they are not.
    """
    network = sampler.model
    if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
        return f"policy version {policy.version} has weights that are not finite"
    batch: Batch = sampler.open(max_rows=1)
    batch.submit(_probe(network.config))
    try:
        for _ in range(2):
            batch.step()
    except FloatingPointError:
        return f"policy version {policy.version} has predictions that are not finite"
    return None


def _probe(config: AnyConfig) -> AnyRequest:
    if isinstance(config, RenoisingConfig):
        # One canvas.
        brief = RenoisingParams(gen_length=1, max_denoise_steps=2)
        return RenoisingRequest(prompt_ids=(config.pad_token_id,), params=brief, seed=0)
    length = min(16, config.max_sequence_length // 2)
    params = SamplingParams(gen_length=length, block_length=length, num_denoise_steps=min(2, length), temperature=0.0)
    return Request(prompt_ids=(config.eos_token_id,), params=params, seed=0)
