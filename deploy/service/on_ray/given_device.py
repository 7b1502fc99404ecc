"""Where an engine computes: on the GPU that Ray has given it, or on the CPU."""

from __future__ import annotations

import ray
import torch

from learner.hardware import indexed_device, limit_memory


def given_device() -> torch.device:
    """The device, its memory limited to the share of it. A GPU that is seen without having been given is somebody
    else's, a sampler's say: Ray does not hide it."""
    context = ray.get_runtime_context()
    if not context.get_accelerator_ids().get("GPU"):
        return indexed_device("cpu")
    device = indexed_device("cuda")
    limit_memory(device, context.get_assigned_resources().get("GPU", 1.0))
    return device
