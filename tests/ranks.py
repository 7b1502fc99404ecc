"""Ranks of a process group, as processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing as mp

# Preloaded in the fork server: otherwise each rank would spend seconds of CPU on these imports.
_HEAVY = ["learner.learner", "learner.sft.learner", "peft.tuners.lora", "torch.testing", "hypothesis", "pytest"]


def run_ranks(function: Callable[..., None], *arguments: object, num: int) -> None:
    """Call `function(rank, *arguments)` in `num` processes and wait for them. Raises the first error of a rank."""
    multiprocessing.set_forkserver_preload(_HEAVY)
    mp.start_processes(function, args=arguments, nprocs=num, join=True, start_method="forkserver")
