"""Ranks of a process group, as processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing as mp

# What each rank would import by itself, for seconds of a CPU: they are forked from one process that has it.
_HEAVY = ["learner.learner", "learner.sft.learner", "peft.tuners.lora", "torch.testing", "hypothesis", "pytest"]


def run_ranks(function: Callable[..., None], *arguments: object, num: int) -> None:
    """Call `function(rank, *arguments)` in `num` processes and wait for them; raises what the first of them raised."""
    multiprocessing.set_forkserver_preload(_HEAVY)
    mp.start_processes(function, args=arguments, nprocs=num, join=True, start_method="forkserver")
