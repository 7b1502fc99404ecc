"""Worker pool of offline work: one worker in this process, or actors of Ray, on this machine or at RAY_ADDRESS."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deploy.errors import RunFailedError, UserError, reason
from deploy.offline.item import AnsweredBatch, Batch
from deploy.offline.policy import Device, choose_device
from deploy.offline.worker import Worker, WorkerConfig
from learner.model.checkpoint_files import checkpoint_chain, weight_bytes

_SMALL_BYTES = 200 << 20
_DIED = "workers died again and again, killed or out of memory; what was answered is kept"
_MAX_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """Number of workers and their device; None: chosen by the available hardware."""

    num_workers: int | None
    """Number of workers."""
    device: Device | None
    """Device of the workers."""


def answer_batches(config: WorkerConfig, settings: PoolSettings, batches: Sequence[Batch]) -> Iterator[AnsweredBatch]:
    """Yield batches as they are sampled and graded. The workers end with the iterator.

    Raises UserError if the device does not exist or the checkpoint cannot be read, and RunFailedError if workers died
    or ran out of memory, or the policy's weights are invalid.
    """
    try:
        if "RAY_ADDRESS" in os.environ:
            yield from _on_ray(config, settings, batches)
            return
        placed, num_workers = place_workers(config, settings)
        if min(num_workers, len(batches)) == 1:
            yield from map(Worker(placed).answer, batches)
        else:
            yield from _on_ray(placed, replace(settings, num_workers=num_workers), batches)
    except FloatingPointError as error:
        raise RunFailedError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise RunFailedError("the device is out of memory; take fewer --slots, or --dtype bfloat16") from error
    except (ValueError, OSError) as error:
        what = reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"{config.checkpoint} cannot be sampled: {what}") from error


def place_workers(config: WorkerConfig, settings: PoolSettings) -> tuple[WorkerConfig, int]:
    """Return the config and the number of workers on this machine: they share its GPUs, or else its cores."""
    if choose_device(settings.device) == "cuda":
        return replace(config, device="cuda"), settings.num_workers or torch.cuda.device_count()
    num_cores = len(os.sched_getaffinity(0))
    # Steps of a small policy are too short for several threads. For a large policy, one copy is enough.
    is_small = config.checkpoint is not None and weight_bytes(checkpoint_chain(config.checkpoint)[-1]) < _SMALL_BYTES
    num_workers = settings.num_workers or (num_cores if is_small else 1)
    return replace(config, device="cpu", num_threads=max(1, num_cores // num_workers)), num_workers


def _on_ray(config: WorkerConfig, settings: PoolSettings, batches: Sequence[Batch]) -> Iterator[AnsweredBatch]:
    """Work on Ray actors. An actor that dies, alone or with its node, is restarted, and its batch is repeated."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util import ActorPool

    from actors.resources import sampler_resources
    from deploy.ray_session import ray_session

    with ray_session(dashboard=False) as session:
        found = ray.cluster_resources()
        num_gpus = int(found.get("GPU", 0))
        if settings.device == "cuda" and not num_gpus:
            raise UserError("--device cuda: the cluster has no GPU; take --device cpu")
        device = "cuda" if num_gpus and settings.device != "cpu" else "cpu"
        num_workers = settings.num_workers or (num_gpus if device == "cuda" else max(1, int(found.get("CPU", 1))))
        options = sampler_resources(device, min(1.0, num_gpus / num_workers))
        if session.is_ours:
            # As many as were asked for, whatever the number of cores.
            options["num_cpus"] = 0
        actor = ray.remote(Worker).options(max_restarts=_MAX_RESTARTS, max_task_retries=_MAX_RESTARTS, **options)
        workers = [actor.remote(replace(config, device=device)) for _ in range(min(num_workers, len(batches)))]
        try:
            pool: Any = ActorPool(workers)
            yield from pool.map_unordered(lambda worker, batch: worker.answer.remote(batch), batches)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise RunFailedError(_DIED) from error
