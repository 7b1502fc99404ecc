"""GPU stage of the service's engine: throughput and latency by concurrency, and during a weight swap."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch

from actors.registry.records import POLICY, PolicyVersion
from benchmarks.gpu.setting import Row, Setting, random_policy
from deploy.service.contract import Done, Event, Job, Refused
from deploy.service.engine.engine import Engine
from deploy.service.engine.versions import Versions
from rollout.config import EngineConfig
from rollout.sampler import Sampler

_ROUNDS = 3
_TIMEOUT_S = 240.0


def engine(setting: Setting) -> Iterator[Row]:
    """Measure tokens per second and latency by concurrency, then the same during a weight swap."""
    served = _Served(setting)
    try:
        served.answer(0)
        for concurrency in setting.concurrency:
            yield served.row(f"engine, {concurrency} at a time", concurrency)
        most = setting.concurrency[-1]
        swap = threading.Thread(target=served.swap)
        swap.start()
        yield served.row(f"the same, a version taking over, {most} at a time", most)
        swap.join()
    finally:
        served.close()


class _Served:
    """Engine with a random policy, and its clients."""

    def __init__(self, setting: Setting) -> None:
        nothing: dict[str, None] = dict.fromkeys(
            ("num_correct", "num_problems", "checkpoint", "weight_store", "manifest_digest")
        )
        # Each client has its own prompt, because rows with equal canvases share one forward.
        self._setting = setting.of_two_blocks()
        self._requests = self._setting.requests(max(setting.concurrency))
        self._policy = PolicyVersion(version=0, round=0, phase="rl", **nothing)
        sampler = self._loaded(self._policy)
        self._versions = Versions(sampler, self._policy, load=self._loaded, locate=lambda _: None, most_live=2)
        self._engine = Engine(self._versions)

    def swap(self) -> None:
        """Load another policy version."""
        self._versions.adopt(replace(self._policy, version=1))

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def answer(self, client: int) -> float:
        """Send a request of this client and return its seconds. Raises RuntimeError if it fails."""
        ended, failures = threading.Event(), list[str]()

        def tell(event: Event) -> None:
            if isinstance(event, Refused):
                failures.append(event.message)
            if isinstance(event, Refused | Done):
                ended.set()

        began = time.perf_counter()
        job = Job(requests={0: self._requests[client]}, wanted=POLICY, timeout_s=_TIMEOUT_S)
        self._engine.submit(job, self._versions.acquire(POLICY), tell)
        if not ended.wait(_TIMEOUT_S) or failures:
            raise RuntimeError(f"a request was not answered: {failures or 'in time'}")
        return time.perf_counter() - began

    def row(self, what: str, concurrency: int) -> Row:
        """Measure closed-loop clients, each of which sends its next request after an answer."""
        times: list[float] = []

        def ask(place: int) -> None:
            times.extend(self.answer(place) for _ in range(_ROUNDS))

        clients = [threading.Thread(target=ask, args=(place,)) for place in range(concurrency)]
        began = time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        seconds, expected = time.perf_counter() - began, _ROUNDS * concurrency
        if len(times) != expected:
            raise RuntimeError("a client ended before it was answered")
        return {
            "what": what,
            "tokens_per_s": expected * self._setting.gen_length / seconds,
            "median_s": median(times),
            "slowest_s": max(times),
        }

    def _loaded(self, policy: PolicyVersion) -> Sampler:
        return Sampler(random_policy(self._setting, torch.bfloat16), policy.version, EngineConfig(dtype="bfloat16"))
