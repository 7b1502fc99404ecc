"""Policy versions in memory, reference-counted: the serving one, and those that running jobs still use.

A new version is loaded next to the serving one and checked before it takes over. A job ends with the version that it
began with.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from actors.registry.records import POLICY, PolicyVersion
from deploy.requests.families import AnyConfig
from deploy.service.contract import RefusedVersion
from learner.model.renoising.config import RenoisingConfig
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.renoising.sampler import AnySampler, RenoisingBatch
from rollout.request import Request, SamplingParams
from rollout.sampler import SlotBatch

Load = Callable[[PolicyVersion], AnySampler]
"""Creates the sampler of a version. Raises LookupError if its weights are missing, ValueError if they are damaged."""
Locate = Callable[[str | int], PolicyVersion | None]
"""Finds an alias or a version that is not in memory; None if there is no such version."""
AnyBatch = SlotBatch | RenoisingBatch
"""Batch of a version, stepped explicitly. It takes requests of its version's policy family only."""

_MAX_KNOWN = 200
_MAX_REFUSED = 20
_POLL_S = 0.5
_LINGER_S = 300.0
# The follower tries again; meanwhile requests may load versions.
_SWAP_TIMEOUT_S = 2.0
_BRING_TIMEOUT_S = 30.0


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
        self.batch: AnyBatch | None = None
        """Its rows; only the engine's thread uses it."""
        self.num_jobs = 0
        self.used_at_s = time.monotonic()

    @property
    def config(self) -> AnyConfig:
        """Model config of the policy."""
        return self.sampler.model.config


class Versions:
    """Up to `most_live` versions. Thread-safe."""

    def __init__(
        self,
        sampler: AnySampler,
        policy: PolicyVersion,
        *,
        load: Load,
        locate: Locate,
        most_live: int = 4,
    ) -> None:
        """Serve `policy` with `sampler` first.

        At most `most_live` versions (2 or more) are in memory, including those that only old requests still use.
        """
        self._load, self._locate, self._most_live = load, locate, most_live
        # One load at a time; never held while a request is served.
        self._loading = threading.Lock()
        self._changed = threading.Condition()
        self._current = LoadedVersion(sampler, policy)
        self._live = [self._current]
        self._known: dict[int, PolicyVersion] = {}
        self._refused: deque[RefusedVersion] = deque(maxlen=_MAX_REFUSED)
        self.scored = policy if policy.num_problems else None
        self.announced: PolicyVersion | None = None
        self.num_swaps = 0

    @property
    def policy(self) -> PolicyVersion:
        """The serving version."""
        return self._current.policy

    @property
    def live(self) -> tuple[PolicyVersion, ...]:
        """The versions in memory."""
        with self._changed:
            return tuple(live.policy for live in self._live)

    def forget_idle(self) -> None:
        """Unload the versions that no request has used for five minutes."""
        with self._changed:
            now = time.monotonic()
            self._live = [live for live in self._live if not self._is_idle(live) or now - live.used_at_s < _LINGER_S]

    def located(self, alias: str) -> int | None:
        """Return the version of the alias `base` or `best`."""
        found = self._locate(alias)
        return None if found is None else found.version

    @property
    def refused(self) -> tuple[RefusedVersion, ...]:
        """The versions refused most recently."""
        with self._changed:
            return tuple(self._refused)

    def learn(self, policy: PolicyVersion) -> None:
        """Record the metadata of the announced version, without loading it."""
        self.announced = policy
        self._take_over(policy)

    def adopt(self, policy: PolicyVersion) -> None:
        """Load and check a version next to the serving one, then serve it. One thread at a time may call this.

        Raises:
            NoSuchVersionError: its weights are missing.
            RefusedVersionError: it failed a check; `refused` then lists it.
            NoRoomError: every version in memory is in use; nothing has changed.
        """
        try:
            live = self._bring(policy, _SWAP_TIMEOUT_S)
            try:
                self._serve(live)
            finally:
                self.release(live)
        except RefusedVersionError as error:
            refused = RefusedVersion(version=policy.version, why=str(error))
            with self._changed:
                if refused not in self._refused:
                    self._refused.append(refused)
            raise
        self._take_over(policy)

    def acquire_live(self, wanted: str | int, began_with: PolicyVersion | None = None) -> LoadedVersion | None:
        """Acquire as `acquire`, without waiting; None if the version may have to be loaded or located."""
        with self._changed:
            if began_with is not None:
                found = [live for live in self._live if began_with.has_same_weights(live.policy)]
            elif wanted == POLICY:
                found = [self._current]
            else:
                found = [live for live in self._live if live.policy.version == wanted]
            return _used(found[-1]) if found else None

    def acquire(self, wanted: str | int, began_with: PolicyVersion | None = None) -> LoadedVersion:
        """Return a version that stays in memory until it is released. Loads it if necessary.

        Args:
            wanted: an alias or a version.
            began_with: the exact weights that are needed; None: any of that version.

        Raises:
            NoSuchVersionError, RefusedVersionError, NoRoomError: as in `adopt`.
        """
        version = wanted
        if isinstance(wanted, str) and wanted != POLICY and began_with is None:
            found = self.located(wanted)
            version = wanted if found is None else found
        live = self.acquire_live(version, began_with)
        return live or self._bring(self._lookup(version, began_with), _BRING_TIMEOUT_S)

    def release(self, live: LoadedVersion) -> None:
        """Release a version after a job."""
        with self._changed:
            live.num_jobs -= 1
            live.used_at_s = time.monotonic()
            self._changed.notify_all()

    def _take_over(self, policy: PolicyVersion) -> None:
        """Store the metadata of a version."""
        with self._changed:
            self._known.pop(policy.version, None)
            self._known[policy.version] = policy
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            for live in self._live:
                if policy.has_same_weights(live.policy):
                    live.policy = policy
            if policy.num_problems:
                self.scored = policy

    def _bring(self, policy: PolicyVersion, timeout_s: float) -> LoadedVersion:
        """Acquire a version, loading it if necessary."""
        with self._loading:
            live = self.acquire_live(policy.version, policy)
            return live or self._make(policy, timeout_s)

    def _serve(self, live: LoadedVersion) -> None:
        with self._changed:
            if live is not self._current:
                self._current.used_at_s = time.monotonic()
                self._current = live
                self.num_swaps += 1
            # These may be other weights than those refused under this number, or intact ones from elsewhere.
            allowed = [one for one in self._refused if one.version != live.policy.version]
            self._refused = deque(allowed, maxlen=_MAX_REFUSED)
            self._changed.notify_all()

    def _lookup(self, wanted: str | int, began_with: PolicyVersion | None) -> PolicyVersion:
        """Find the metadata of a version that is not in memory."""
        version = wanted if began_with is None else began_with.version
        announced = self._known.get(version) if isinstance(version, int) else None
        # A resumed run may have announced other weights under the number since.
        if began_with is not None and announced is not None and not began_with.has_same_weights(announced):
            raise NoSuchVersionError(f"Policy version {version} has other weights now.")
        policy = began_with or announced
        if policy is None or policy.checkpoint is None:
            # The store may have dropped it, and a checkpoint may have been written since.
            on_disk = self._locate(version)
            policy = on_disk if policy is None else policy.with_checkpoint_of(on_disk)
        if policy is None:
            raise NoSuchVersionError(f"There is no policy version {wanted} here.")
        return policy

    def _make(self, policy: PolicyVersion, timeout_s: float) -> LoadedVersion:
        """Load, check and acquire a version; `_loading` is held."""
        self._make_room(timeout_s)
        try:
            sampler = self._load(policy)
            assert sampler.policy_version == policy.version, "a policy is announced under the version of its sampler"
            if why := _finite_probe(sampler, policy):
                raise RefusedVersionError(why)
        except LookupError as error:
            raise NoSuchVersionError(str(error)) from error
        # torch raises RuntimeError for weights of another shape.
        except (ValueError, RuntimeError) as error:
            raise RefusedVersionError(f"Policy version {policy.version} is not served: {error}") from error
        live = LoadedVersion(sampler, policy)
        with self._changed:
            self._live.append(live)
            return _used(live)

    def _is_idle(self, live: LoadedVersion) -> bool:
        return live is not self._current and not live.num_jobs

    def _make_room(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._live) >= self._most_live:
                idle = [live for live in self._live if self._is_idle(live)]
                if idle:
                    self._live.remove(min(idle, key=lambda live: live.used_at_s))
                elif time.monotonic() > deadline:
                    raise NoRoomError(
                        f"All {self._most_live} policy versions in memory were in use for {timeout_s:.0f} s."
                    )
                else:
                    self._changed.wait(_POLL_S)


def _used(live: LoadedVersion) -> LoadedVersion:
    """Count one more job; the lock of the versions is held."""
    live.num_jobs += 1
    return live


@torch.inference_mode()
def _finite_probe(sampler: AnySampler, policy: PolicyVersion) -> str | None:
    """Check that weights and predictions are finite, by two denoise steps, which also warm up the network.

    Returns the reason if they are not.
    """
    network = sampler.model
    if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
        return f"policy version {policy.version} has weights that are not finite"
    batch = sampler.open(max_rows=1)
    batch.submit(_probe(network.config))
    try:
        for _ in range(2):
            batch.step()
    except FloatingPointError:
        return f"policy version {policy.version} has predictions that are not finite"
    return None


def _probe(config: AnyConfig) -> Any:
    """Create a short request for a policy of either family."""
    if isinstance(config, RenoisingConfig):
        # One canvas.
        brief = RenoisingParams(gen_length=1, max_denoise_steps=2)
        return RenoisingRequest(prompt_ids=(config.pad_token_id,), params=brief, seed=0)
    length = min(16, config.max_sequence_length // 2)
    params = SamplingParams(gen_length=length, block_length=length, num_denoise_steps=min(2, length), temperature=0.0)
    return Request(prompt_ids=(config.eos_token_id,), params=params, seed=0)
