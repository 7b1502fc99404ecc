"""What the stages of a visit share: where they compute, the table, and how long each may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.gpu.end_to_end.table import Table

_LOOK_EVERY_S = 0.2


class StageError(Exception):
    """A stage cannot go on; says why in a line."""


@dataclass(kw_only=True, slots=True)
class Visit:
    """One run through the stages."""

    device: Literal["cuda", "cpu"]
    """Where the commands compute; `cpu` rehearses at toy sizes."""
    out: Path
    """Where runs and checkpoints are made."""
    table: Table
    gpu: str = ""
    """The GPU's name; empty in a rehearsal."""
    stage: str = ""
    """The stage under way."""
    ends_at: float = 0.0
    """When it has to end, on the monotonic clock."""
    on_cpu: dict[str, float] = field(default_factory=dict)
    """What the CPU's run gave, by what it is."""

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU in it."""
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        """Seconds that the stage has left."""
        return self.ends_at - time.monotonic()

    def row(self, what: str, measured: str, beside: str = "") -> None:
        """A row of the stage under way."""
        self.table.add(self.stage, what, measured, beside)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> float:
        """Seconds until it is so. Raises StageError when the stage's time is over."""
        began = time.monotonic()
        while not is_so():
            if self.left_s <= 0:
                raise StageError(f"its time was over while it waited for {what}")
            time.sleep(_LOOK_EVERY_S)
        return time.monotonic() - began
