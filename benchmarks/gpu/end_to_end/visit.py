"""Shared context of the stages: device, output folder, table and time limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.gpu.end_to_end.table import Table

_LOOK_EVERY_S = 0.2


class StageError(Exception):
    """A stage cannot continue. The message gives the reason in one line."""


@dataclass(kw_only=True, slots=True)
class Visit:
    """One run through the stages."""

    device: Literal["cuda", "cpu"]
    """Device of the commands. `cpu` rehearses at toy sizes."""
    out: Path
    """Folder of runs and checkpoints."""
    table: Table
    gpu: str = ""
    """Name of the GPU. Empty in a rehearsal."""
    stage: str = ""
    """Name of the current stage."""
    ends_at: float = 0.0
    """Deadline of the current stage, on the monotonic clock."""
    on_cpu: dict[str, float] = field(default_factory=dict)
    """Metrics of the CPU run, by name."""

    @property
    def is_rehearsal(self) -> bool:
        """Whether the stages run without a GPU."""
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until the stage's deadline."""
        return self.ends_at - time.monotonic()

    def row(self, what: str, measured: str, beside: str = "") -> None:
        """Add a row for the current stage."""
        self.table.add(self.stage, what, measured, beside)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> float:
        """Wait for a condition and return the seconds. Raises StageError at the stage's deadline."""
        began = time.monotonic()
        while not is_so():
            if self.left_s <= 0:
                raise StageError(f"its time was over while it waited for {what}")
            time.sleep(_LOOK_EVERY_S)
        return time.monotonic() - began
