"""Device of an engine: the GPU that Ray has assigned to it, or the CPU."""

from __future__ import annotations

import ray
import torch

from learner.hardware import indexed_device, limit_memory


def given_device() -> torch.device:
    """Return the device, with its memory limited to the assigned share.

    Ray does not hide a GPU that it has not assigned; it belongs to another actor, such as a sampler.
    """
    context = ray.get_runtime_context()
    if not context.get_accelerator_ids().get("GPU"):
        return indexed_device("cpu")
    device = indexed_device("cuda")
    limit_memory(device, context.get_assigned_resources().get("GPU", 1.0))
    return device
