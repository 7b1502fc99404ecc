"""Ending of a training stage: step and time limits, stop requests, and lack of GPU memory.

Only rank 0 reads the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from learner.model.deferred import torch
from learner.parallel.consensus import Ranks


class Pulse(Protocol):
    """Interface of a rank's heartbeat: its activity, and stop requests. See `actors/training/run_client.py`'s
    `Heartbeat`."""

    doing: str
    must_stop: bool


class StopRequestedError(Exception):
    """The run stops here, as requested."""


class OutOfGpuMemoryError(RuntimeError):
    """An update ran out of GPU memory; smaller micro-batches need less, and give the same gradient."""

    def __init__(self, section: str, what: str) -> None:
        """Take the recipe section of these micro-batches, `sft` or `learner`, and the message."""
        super().__init__(what)
        self.section = section


@contextmanager
def catching_gpu_oom(section: str, what: str, rank: int) -> Iterator[None]:
    """Raise OutOfGpuMemoryError if the block runs out of memory on this rank's GPU.

    The other ranks are blocked in a collective that this one does not reach, so all ranks restart.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_sentence = str(error).partition(". ")[0]
        raise OutOfGpuMemoryError(
            section, f"{what}: the GPU of rank {rank} is out of memory ({first_sentence})"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Limit of a stage, in steps or in seconds."""

    num_steps: int
    """Optimizer steps, or rounds."""
    seconds: float = 0.0
    """Time limit, which replaces the number of steps; 0: none."""

    def progress(self, step: int, seconds: float) -> float:
        """Return the completed share of the time limit, or else of the steps. The stage has ended from 1 on."""
        if self.seconds:
            return seconds / self.seconds
        return step / self.num_steps if self.num_steps else 1.0


class Stopwatch:
    """Stopwatch of a stage, which can be paused."""

    def __init__(self, clock: Callable[[], float], before_s: float = 0.0) -> None:
        """Start; `before_s` is the time that an interrupted run had taken."""
        self._clock, self._began = clock, clock() - before_s

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._clock() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        began = self._clock()
        yield
        self._began += self._clock() - began


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision that all ranks share between two steps or rounds of a stage."""

    seconds: float
    """Time of the stage so far."""
    must_save: bool
    """A checkpoint by time is due."""
    must_stop: bool
    """A stop was requested."""


def agreed_decision(
    ranks: Ranks, pulse: Pulse, seconds: Callable[[], float], must_save: Callable[[], bool]
) -> Decision:
    """Return rank 0's decision on every rank. A collective."""
    return Decision(
        **ranks.broadcast_decision(
            lambda: {"seconds": seconds(), "must_save": must_save(), "must_stop": pulse.must_stop}
        )
    )
