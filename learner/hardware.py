"""Which device a process computes on, what it can do, and how much memory it took."""

from __future__ import annotations

import gc
import resource

import torch

# Dense bfloat16 products, FLOP/s, as NVIDIA's data sheets state them, by the very name of the device: a part of one
# (MIG), a slower clock or another form factor has another name, and another rate.
_PEAK_FLOP_PER_S = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}


_LEAST_SHARED_PARAMETERS = 50_000_000


def threads_for(model: torch.nn.Module, num_threads: int) -> int:
    """How many of the CPU's threads a policy computes with: one for a small policy, whose steps are too short to share.
    On busy cores the others would wait for long."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 1 if num_parameters < _LEAST_SHARED_PARAMETERS else num_threads


def placed_on(device: str | torch.device) -> torch.device:
    """The device that tensors name when they are placed on `cpu`, `cuda` or `cuda:1`: a GPU always has an index.

    Some functions of `torch.cuda` refuse a device without one, and `cuda` is not equal to `cuda:0`.
    """
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def peak_flop_per_s(device: torch.device) -> float | None:
    """The stated rate of a device's dense bfloat16 products; None for CPUs and for devices that are not known here."""
    return _PEAK_FLOP_PER_S.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process take so much of a GPU's memory: who shares the GPU with others must leave them theirs."""
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


def free_unused_memory(device: torch.device) -> None:
    """Give what PyTorch keeps of a GPU's memory for tensors to come back to the GPU, for other processes."""
    if device.type == "cuda":
        # Those that only a cycle holds too.
        gc.collect()
        torch.cuda.empty_cache()


def forget_peak_memory(device: torch.device) -> None:
    """Measure the peak of a GPU's memory anew from here on; that of a process goes on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a GPU since the peak was forgotten; on a CPU the process's largest resident size
    since it began, everything that it has loaded included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB.
