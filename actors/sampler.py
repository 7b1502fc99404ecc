"""Sampler worker: holds one policy version and samples completions from it.

An ordinary class, which `actors/cluster.py` makes a Ray actor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.messages import Generation, Portion
from actors.packed import Completions
from rollout.config import EngineConfig

if TYPE_CHECKING:
    from actors.weights.fetching import Reader

_FETCH_TIMEOUT_S = 120.0


def read_from(store: Any) -> Callable[[], Reader]:
    """Return a function that opens a reader of this weight store (a Ray handle).

    The sampler's process calls it, so that the driver does not load torch.
    """
    return partial(_store_reader, store)


def _store_reader(store: Any) -> Reader:
    from actors.weights.fetching import StoreReader

    return StoreReader(store, _FETCH_TIMEOUT_S)


class SamplerWorker:
    """Sampler of completions from exactly the policy version that a request names."""

    def __init__(
        self,
        checkpoint: Path,
        open_store: Callable[[], Reader],
        device: str,
        engine: EngineConfig,
        gpu_share: float = 1.0,
        *,
        is_asleep: bool = False,
    ) -> None:
        """Create an empty policy of a checkpoint's shape; with `is_asleep` it allocates device memory at its first use.

        The base checkpoints of adapters are siblings of `checkpoint`. `open_store` opens the reader of policy versions,
        for instance `read_from` of a weight store on Ray.
        """
        # Imported here: every process with this actor's handle imports its class, the coordinator too.
        import torch

        from actors.weights.fetching import PolicyLoader, StagingReader
        from learner.hardware import indexed_device, limit_memory
        from learner.model.checkpoint import empty_policy
        from rollout.sampler import Sampler

        torch.set_num_threads(1)
        self._device, self._is_asleep = indexed_device(device), is_asleep
        limit_memory(self._device, gpu_share)
        self._policy = empty_policy(checkpoint, engine.torch_dtype, "meta" if is_asleep else self._device)
        self._make_sampler = partial(Sampler, self._policy)
        self._engine = engine
        self._sampler: Sampler | None = None
        self._reader = StagingReader(open_store())
        self._loader = PolicyLoader(self._policy, self._reader, checkpoint.parent)
        self._generation: Generation | None = None
        self._asked: Generation | None = None

    def ready(self) -> int:
        """Return the process id once the actor is up; a different id means that it restarted."""
        return os.getpid()

    def stage(self, generation: Generation) -> None:
        """Prefetch and verify the next weights, on a separate thread while sampling continues."""
        # Otherwise `generate` has them already, or is fetching them.
        if generation != self._asked:
            self._reader.stage(generation)

    def generate(self, generation: Generation, portion: Portion) -> tuple[Completions, int]:
        """Sample a work unit's completions from exactly these weights, fetched and verified if they are not loaded.

        Returns the completions and their number. A caller that only waits for them can wait for the number.
        """
        self._asked = generation
        if generation != self._generation:
            self._generation = None
            self._wake()
            self._loader.load(generation)
            self._generation = generation
        if self._sampler is None:
            self._sampler = self._make_sampler(generation.version, engine=self._engine)
        self._sampler.policy_version = generation.version
        sampler = self._sampler
        if portion.is_long and self._engine.compile:
            # Each new length would take minutes to compile, and keep memory for its width.
            not_compiled = self._engine.model_copy(update={"compile": False})
            sampler = self._make_sampler(generation.version, engine=not_compiled)
        completions = sampler.generate(portion.requests)
        return Completions(completions), len(completions)

    def sleep(self) -> None:
        """Release the device memory; the next call of `generate` allocates it again and fetches the weights."""
        from learner.hardware import free_unused_memory

        self._generation, self._sampler, self._is_asleep = None, None, True
        self._loader.let_go()
        self._policy.to_empty(device="meta")
        free_unused_memory(self._device)

    def _wake(self) -> None:
        if self._is_asleep:
            self._policy.to_empty(device=self._device)
            self._is_asleep = False
