"""The pools' samplers: an ordinary class, made a Ray actor where the pools are built."""

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
    """A sampler's way to the weight store with this Ray handle, opened in the sampler's process: the driver loads no
    torch for it."""
    return partial(_store_reader, store)


def _store_reader(store: Any) -> Reader:
    from actors.weights.fetching import StoreReader

    return StoreReader(store, _FETCH_TIMEOUT_S)


class SamplerWorker:
    """Holds one policy version and samples from it. Without weights it takes none on faith: it fetches them first."""

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
        """Make an empty policy of a checkpoint's shape; one that is asleep takes memory as it is first used.

        What adapters stand on lies beside `checkpoint`. `open_store` gives what versions are read from: `read_from` a
        weight store on Ray.
        """
        # Here and not above: whoever gets this actor's handle imports its class, the coordinator too.
        import torch

        from actors.weights.fetching import PolicyLoader, StagingReader
        from learner.hardware import limit_memory, placed_on
        from learner.model.checkpoint import empty_policy
        from rollout.sampler import Sampler

        torch.set_num_threads(1)
        self._device, self._is_asleep = placed_on(device), is_asleep
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
        """Answers once the actor is up, with its process id: another one is a restart."""
        return os.getpid()

    def stage(self, generation: Generation) -> None:
        """Fetch and verify weights that will be sampled from, while others are: on a thread of its own."""
        # Else it is here, or is being fetched as it is asked for.
        if generation != self._asked:
            self._reader.stage(generation)

    def generate(self, generation: Generation, portion: Portion) -> tuple[Completions, int]:
        """Completions of a portion by exactly those weights, fetched and verified where they are not held.

        Returns them and their number: a caller that only needs to know that they are there waits for the number.
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
            # Each length would take minutes to compile, and memory of its width for good.
            not_compiled = self._engine.model_copy(update={"compile": False})
            sampler = self._make_sampler(generation.version, engine=not_compiled)
        completions = sampler.generate(portion.requests)
        return Completions(completions), len(completions)

    def sleep(self) -> None:
        """Give the memory of the device back: the next call of `generate` takes it again, and fetches the weights."""
        from learner.hardware import free_unused_memory

        self._generation, self._sampler, self._is_asleep = None, None, True
        self._loader.let_go()
        self._policy.to_empty(device="meta")
        free_unused_memory(self._device)

    def _wake(self) -> None:
        if self._is_asleep:
            self._policy.to_empty(device=self._device)
            self._is_asleep = False
