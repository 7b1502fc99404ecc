"""Sampler worker: holds one policy version and samples completions from it.

An ordinary class, which `actors/cluster.py` makes a Ray actor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.columnar import Completions
from actors.messages import WeightsId, WorkUnit
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
        is_offloaded: bool = False,
    ) -> None:
        """Create an empty policy of a checkpoint's shape; with `is_offloaded` it gets device memory at its first use.

        The base checkpoints of adapters are siblings of `checkpoint`. `open_store` opens the reader of policy versions,
        for instance `read_from` of a weight store on Ray.
        """
        # Imported here: every process with this actor's handle imports its class, the coordinator too.
        import torch

        from actors.weights.fetching import PolicyLoader, PrefetchingReader
        from learner.hardware import indexed_device, limit_memory
        from learner.model.checkpoint import empty_policy
        from rollout.sampler import Sampler

        torch.set_num_threads(1)
        self._device, self._is_offloaded = indexed_device(device), is_offloaded
        limit_memory(self._device, gpu_share)
        self._policy = empty_policy(checkpoint, engine.torch_dtype, "meta" if is_offloaded else self._device)
        self._make_sampler = partial(Sampler, self._policy)
        self._engine = engine
        self._sampler: Sampler | None = None
        self._reader = PrefetchingReader(open_store())
        self._loader = PolicyLoader(self._policy, self._reader, checkpoint.parent)
        self._weights_id: WeightsId | None = None
        self._requested: WeightsId | None = None

    def ready(self) -> int:
        """Return the process id once the actor is up; a different id means that it restarted."""
        return os.getpid()

    def prefetch(self, weights_id: WeightsId) -> None:
        """Prefetch and verify the next weights, on a separate thread while sampling continues."""
        # Otherwise `generate` has them already, or is fetching them.
        if weights_id != self._requested:
            self._reader.prefetch(weights_id)

    def generate(self, weights_id: WeightsId, work_unit: WorkUnit) -> tuple[Completions, int]:
        """Sample a work unit's completions from exactly these weights, fetched and verified if they are not loaded.

        Returns the completions and their number. A caller that only waits for them can wait for the number.
        """
        self._requested = weights_id
        if weights_id != self._weights_id:
            self._weights_id = None
            self._onload()
            self._loader.load(weights_id)
            self._weights_id = weights_id
        if self._sampler is None:
            self._sampler = self._make_sampler(weights_id.version, engine=self._engine)
        self._sampler.policy_version = weights_id.version
        sampler = self._sampler
        if work_unit.is_long and self._engine.compiles_policy:
            # Each new length would take minutes to compile, and keep memory for its width.
            not_compiled = self._engine.model_copy(update={"compile": False})
            sampler = self._make_sampler(weights_id.version, engine=not_compiled)
        completions = sampler.generate(work_unit.requests)
        return Completions(completions), len(completions)

    def offload(self) -> None:
        """Release the device memory; the next call of `generate` allocates it again and fetches the weights."""
        from learner.hardware import free_unused_memory

        self._weights_id, self._sampler, self._is_offloaded = None, None, True
        self._loader.forget_base()
        self._policy.to_empty(device="meta")
        free_unused_memory(self._device)

    def _onload(self) -> None:
        if self._is_offloaded:
            self._policy.to_empty(device=self._device)
            self._is_offloaded = False
