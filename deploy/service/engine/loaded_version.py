"""A loaded policy version, and the canary that it must pass before it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from actors.registry.records import PolicyVersion
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler, SlotBatch
from rollout.score import Score


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

    def __init__(self, sampler: Sampler, policy: PolicyVersion) -> None:
        self.sampler, self.policy = sampler, policy
        self.batch: SlotBatch | None = None
        """Its rows; the engine's thread alone uses it."""
        self.canary: Score | None = None
        """On the canary; None where it was not asked."""
        self.num_jobs = 0
        self.used_at_s = time.monotonic()


def objection_to(live: LoadedVersion, serving: LoadedVersion, canary: Canary, still_wanted: StillWanted) -> str | None:
    """Why a version is too bad to serve after another, in a clause; None where it is not. Each is asked once.

    Raises NoLongerWantedError.
    """
    scores = []
    try:
        for one in (serving, live):
            one.canary = one.canary or canary.score(one.sampler, still_wanted)
            scores.append(one.canary)
    except CanaryError as error:
        return f"the canary came to no end: {error}"
    return canary.objection(scores[1], scores[0])


@torch.inference_mode()
def finite_probe(sampler: Sampler, policy: PolicyVersion) -> str | None:
    """Two denoise steps, which also warm the network up; bad weights predict what is no number."""
    config = sampler.model.config
    if not all(bool(weight.isfinite().all()) for weight in sampler.model.parameters()):
        return f"policy version {policy.version} has weights that are no numbers"
    length = min(16, config.max_sequence_length // 2)
    params = SamplingParams(gen_length=length, block_length=length, num_denoise_steps=min(2, length), temperature=0.0)
    batch = sampler.open(most_rows=1)
    batch.submit(Request(prompt_ids=(config.eos_token_id,), params=params, seed=0))
    try:
        for _ in range(2):
            batch.step()
    except FloatingPointError:
        return f"policy version {policy.version} predicts what is no number"
    return None
