"""What ends a stage: its steps or rounds, its seconds, or a stop. Rank 0 alone looks at the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from learner.model.deferred import torch
from learner.parallel.ranks import Ranks


class Pulse(Protocol):
    """What a rank says it is at, and hears: `actors/training/run_client.py`'s `Heartbeat`."""

    doing: str
    must_stop: bool


class StopRequestedError(Exception):
    """The run is to stop here."""


class OutOfGpuMemoryError(RuntimeError):
    """A GPU's memory ran out in an update; smaller micro-batches need less, and give the same gradient."""

    def __init__(self, section: str, what: str) -> None:
        """Take the section of the recipe that has these micro-batches, `sft` or `learner`, and what happened."""
        super().__init__(what)
        self.section = section


@contextmanager
def updating(section: str, what: str, rank: int) -> Iterator[None]:
    """Raise OutOfGpuMemoryError where the GPU of this rank has too little memory for what the block does.

    The other ranks wait in a collective that this one does not come to: all begin again.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_sentence = str(error).partition(". ")[0]
        raise OutOfGpuMemoryError(
            section, f"{what}: the memory of rank {rank}'s GPU ran out ({first_sentence})"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How much a stage does before it ends by itself."""

    num_steps: int
    """Optimizer steps, or rounds."""
    seconds: float = 0.0
    """Or as many of them as fit into this time; 0: they are counted."""

    def progress(self, step: int, seconds: float) -> float:
        """How much is done: of the time where that is limited, else of the steps. From 1 on the stage has ended."""
        if self.seconds:
            return seconds / self.seconds
        return step / self.num_steps if self.num_steps else 1.0


class Stopwatch:
    """Seconds that a stage has taken, without those that it was paused for."""

    def __init__(self, clock: Callable[[], float], before_s: float = 0.0) -> None:
        """Begin; `before_s` is what an interrupted run had come to."""
        self._clock, self._began = clock, clock() - before_s

    def seconds(self) -> float:
        """So far."""
        return self._clock() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the block takes does not count."""
        began = self._clock()
        yield
        self._began += self._clock() - began


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the ranks branch on between two steps or rounds of a stage."""

    seconds: float
    """What the stage has taken so far."""
    must_save: bool
    """It is time for a checkpoint."""
    must_stop: bool
    """Somebody wants the run to stop."""


def decided(ranks: Ranks, pulse: Pulse, seconds: Callable[[], float], must_save: Callable[[], bool]) -> Decision:
    """What rank 0 sees of these, on every rank. A collective."""
    return Decision(
        **ranks.agreed(lambda: {"seconds": seconds(), "must_save": must_save(), "must_stop": pulse.must_stop})
    )
