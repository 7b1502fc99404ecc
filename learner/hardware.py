"""Compute devices: threads, peak FLOP/s and memory of a process."""

from __future__ import annotations

import gc
import resource

import torch

# Dense bfloat16 FLOP/s of NVIDIA's data sheets, by the exact device name: a MIG slice, a slower clock or another form
# factor has another name, and another rate.
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


_MIN_SHARED_PARAMETERS = 50_000_000


def threads_for(model: torch.nn.Module, num_threads: int) -> int:
    """Return how many CPU threads a policy computes with: one for a small policy.

    Its operations are too short to split over threads, which on busy cores would wait long for each other.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 1 if num_parameters < _MIN_SHARED_PARAMETERS else num_threads


def indexed_device(device: str | torch.device) -> torch.device:
    """Return the device that tensors on `cpu`, `cuda` or `cuda:1` report: a GPU always has an index.

    Some functions of `torch.cuda` refuse a device without an index, and `cuda` is not equal to `cuda:0`.
    """
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def peak_flop_per_s(device: torch.device) -> float | None:
    """Return a device's dense bfloat16 rate of the data sheet; None for CPUs and unknown devices."""
    return _PEAK_FLOP_PER_S.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def limit_memory(device: torch.device, share: float) -> None:
    """Limit this process to a share of a GPU's memory, for processes that share the GPU."""
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


def free_unused_memory(device: torch.device) -> None:
    """Release PyTorch's cached GPU memory, for other processes."""
    if device.type == "cuda":
        # Frees tensors that only reference cycles hold.
        gc.collect()
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a GPU's memory; a CPU process's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak allocation on a GPU since the last reset; on a CPU, the process's peak resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB.
