"""Worker pool of an evaluation: local processes, or actors on the Ray cluster at RAY_ADDRESS."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from deploy.errors import RunFailedError, UserError, reason
from deploy.offline.evaluation.problems import EvaluationBatch
from deploy.offline.policy import Device, choose_device
from deploy.offline.worker import AnsweredBatch, Worker, WorkerConfig
from deploy.orphans import end_with_parent
from learner.model.checkpoint_files import checkpoint_chain, weight_bytes

_SMALL_BYTES = 200 << 20
_DIED = "a worker of the evaluation died, killed or out of memory; what was answered is kept"
_MOST_RESTARTS = 3

# The worker of this process, if it is a pool process.
_workers: list[Worker] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """Number of workers and their device; None: chosen by the available hardware."""

    num_workers: int | None
    """Number of processes or actors."""
    device: Device | None
    """Device of the workers."""


def answer_batches(
    config: WorkerConfig, settings: PoolSettings, batches: Sequence[EvaluationBatch]
) -> Iterator[AnsweredBatch]:
    """Yield answers to batches as they are completed. The workers end with the iterator.

    Raises:
        UserError: the device does not exist, or the checkpoint cannot be read.
        RunFailedError: a worker died or ran out of memory, or the policy's weights are invalid.
    """
    pool = _on_cluster if "RAY_ADDRESS" in os.environ else _on_this_machine
    try:
        yield from pool(config, settings, batches)
    except FloatingPointError as error:
        raise RunFailedError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise RunFailedError("the device is out of memory; take fewer --slots, or --dtype bfloat16") from error
    except (ValueError, OSError) as error:
        what = reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"{config.checkpoint} cannot be evaluated: {what}") from error


def _on_this_machine(
    config: WorkerConfig, settings: PoolSettings, batches: Sequence[EvaluationBatch]
) -> Iterator[AnsweredBatch]:
    context = multiprocessing.get_context("spawn")
    # One pool per worker: a shared pool starts its workers one by one, and if one dies meanwhile, the thread that
    # should report it crashes (its dictionary "changed size during iteration").
    pools = [
        ProcessPoolExecutor(1, context, _init_worker, (one,))
        for one in worker_configs(config, settings)[: len(batches)]
    ]
    left = iter(batches)
    try:
        with _interrupt_held_back():
            running = {pool.submit(_answer, batch): pool for pool, batch in zip(pools, left, strict=False)}
        while running:
            done = next(as_completed(running))
            pool = running.pop(done)
            yield done.result()
            running |= {pool.submit(_answer, batch): pool for batch in islice(left, 1)}
    except BrokenProcessPool as error:
        raise RunFailedError(_DIED) from error
    finally:
        # After an early end, the results of running batches are not needed.
        for process in multiprocessing.active_children():
            process.terminate()
        for pool in pools:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. Processes started within inherit the blocked signal: the parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_configs(config: WorkerConfig, settings: PoolSettings) -> list[WorkerConfig]:
    """Return one config per local worker: they share the GPUs, or else the cores."""
    if choose_device(settings.device) == "cuda":
        num_gpus = torch.cuda.device_count()
        num_workers = settings.num_workers or num_gpus
        return [replace(config, device=f"cuda:{index % num_gpus}") for index in range(num_workers)]
    num_cores = len(os.sched_getaffinity(0))
    # Steps of a small policy are too short for several threads. For a large policy, one copy is enough.
    num_workers = settings.num_workers or (num_cores if _weight_bytes(config.checkpoint) < _SMALL_BYTES else 1)
    return [replace(config, device="cpu", num_threads=max(1, num_cores // num_workers))] * num_workers


def _weight_bytes(checkpoint: Path) -> int:
    return weight_bytes(checkpoint_chain(checkpoint)[-1])


def _init_worker(config: WorkerConfig) -> None:
    end_with_parent()
    _workers.append(Worker(config))


def _answer(batch: EvaluationBatch) -> AnsweredBatch:
    return _workers[0].answer(batch)


def _on_cluster(
    config: WorkerConfig, settings: PoolSettings, batches: Sequence[EvaluationBatch]
) -> Iterator[AnsweredBatch]:
    """Answer on Ray actors. An actor that dies with its node is restarted elsewhere, and its batch is repeated."""
    import ray
    from ray.exceptions import RayActorError
    from ray.util import ActorPool

    from actors.resources import sampler_resources
    from deploy.ray_session import ray_session

    with ray_session(dashboard=False):
        found = ray.cluster_resources()
        num_gpus = int(found.get("GPU", 0))
        if settings.device == "cuda" and not num_gpus:
            raise UserError("--device cuda: the cluster has no GPU; take --device cpu")
        device = "cuda" if num_gpus and settings.device != "cpu" else "cpu"
        num_workers = settings.num_workers or (num_gpus if device == "cuda" else int(found.get("CPU", 1)))
        options = {"max_restarts": _MOST_RESTARTS, "max_task_retries": _MOST_RESTARTS, **sampler_resources(device)}
        actor = ray.remote(Worker).options(**options)
        workers = [actor.remote(replace(config, device=device)) for _ in range(min(num_workers, len(batches)))]
        try:
            pool: Any = ActorPool(workers)
            yield from pool.map_unordered(lambda worker, batch: worker.answer.remote(batch), batches)
        except RayActorError as error:
            raise RunFailedError(_DIED) from error
