"""A loaded policy version, and the canary that it must pass before it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from actors.registry.records import PolicyVersion
from deploy.requests.families import AnyConfig, AnyRequest
from learner.model.renoising.config import RenoisingConfig
from learner.model.renoising.policy import RenoisingPolicy
from learner.model.transformer import Transformer
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.renoising.sampler import RenoisingSampler
from rollout.request import Completion, Progress, Request, SamplingParams
from rollout.sampler import Sampler
from rollout.score import Score

AnySampler = Sampler | RenoisingSampler
"""Of a policy that fills masked slots, or of one that renoises canvases."""


class Batch(Protocol):
    """The rows of a version, stepped by hand: a `SlotBatch` or a `RenoisingBatch`."""

    @property
    def num_running(self) -> int:
        """Rows that are being denoised."""

    def submit(self, request: Any, /) -> int:
        """Let a request of the sampler's kind wait for a row. Returns its index."""

    def cancel(self, index: int, /) -> None:
        """Forget a request."""

    def num_committed(self) -> dict[int, int]:
        """Slots of the finished blocks of each request with a row."""

    def progress(self, indices: Sequence[int], /) -> dict[int, Progress]:
        """How some requests stand; those without a row are left out."""

    def step(self) -> list[tuple[int, Completion]]:
        """Denoise all for a step, and return what is done with its index."""


class CanaryError(Exception):
    """A version has no score on the canary; says why."""


class NoLongerWantedError(Exception):
    """Something else is to serve since; nothing has changed."""


StillWanted = Callable[[], bool]
"""Whether what is being done is still wanted; it may take a moment to say."""


class Canary(Protocol):
    """Problems that an announced version must solve about as often as the version that serves."""

    def score(self, sampler: Sampler, still_wanted: StillWanted) -> Score:
        """How many of the problems a version solves.

        Raises:
            CanaryError: that cannot be said.
            NoLongerWantedError: it is not wanted any more.
        """
        ...

    def objection(self, score: Score, serving: Score) -> str | None:
        """Why a version is too bad to serve after another, in a clause; None where it is not."""
        ...


class NoSuchVersionError(LookupError):
    """There is no such version, or its weights are gone."""


class RefusedVersionError(ValueError):
    """The version is there, and must not serve."""


class NoRoomError(Exception):
    """Every version in memory is in use; it may be better in a while."""


class LoadedVersion:
    """A version in memory."""

    def __init__(self, sampler: AnySampler, policy: PolicyVersion) -> None:
        self.sampler, self.policy = sampler, policy
        self.batch: Batch | None = None
        """Its rows; the engine's thread alone uses it."""
        self.canary: Score | None = None
        """On the canary; None where it was not asked."""
        self.num_jobs = 0
        self.used_at_s = time.monotonic()

    @property
    def config(self) -> AnyConfig:
        """The policy's."""
        return network_of(self.sampler).config


def objection_to(live: LoadedVersion, serving: LoadedVersion, canary: Canary, still_wanted: StillWanted) -> str | None:
    """Why a version is too bad to serve after another, in a clause; None where it is not. Each is asked once.

    Raises NoLongerWantedError.
    """
    scores = []
    try:
        for one in (serving, live):
            assert isinstance(one.sampler, Sampler), "runs have canaries, and of no other policies"
            one.canary = one.canary or canary.score(one.sampler, still_wanted)
            scores.append(one.canary)
    except CanaryError as error:
        return f"the canary came to no end: {error}"
    return canary.objection(scores[1], scores[0])


def network_of(sampler: AnySampler) -> Transformer | RenoisingPolicy:
    """What a sampler samples from."""
    return sampler.model


@torch.inference_mode()
def finite_probe(sampler: AnySampler, policy: PolicyVersion) -> str | None:
    """Two denoise steps, which also warm the network up; bad weights predict what is no number."""
    network = network_of(sampler)
    if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
        return f"policy version {policy.version} has weights that are no numbers"
    batch: Batch = sampler.open(max_rows=1)
    batch.submit(_probe(network.config))
    try:
        for _ in range(2):
            batch.step()
    except FloatingPointError:
        return f"policy version {policy.version} predicts what is no number"
    return None


def _probe(config: AnyConfig) -> AnyRequest:
    if isinstance(config, RenoisingConfig):
        # A canvas at most.
        brief = RenoisingParams(gen_length=1, max_denoise_steps=2)
        return RenoisingRequest(prompt_ids=(config.pad_token_id,), params=brief, seed=0)
    length = min(16, config.max_sequence_length // 2)
    params = SamplingParams(gen_length=length, block_length=length, num_denoise_steps=min(2, length), temperature=0.0)
    return Request(prompt_ids=(config.eos_token_id,), params=params, seed=0)
