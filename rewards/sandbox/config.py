"""What a program may use, and what confines it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_MIB = 2**20
# Until the tests have said what they know, and all processes are gone.
_ENDING_S = 10.0


class SandboxConfig(BaseModel):
    """How the code of a completion is run. The defaults are enough for every reference solution of HumanEval."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["bubblewrap", "gvisor", "none"] = "bubblewrap"
    """What confines a program. `bubblewrap`: namespaces of the kernel, through `bwrap`. `gvisor`: a kernel of its own,
    through `runsc`. `none`: nothing but limits; the program can read, write and reach all that d1 can."""
    wall_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Seconds by the clock for a program with its tests. What runs out of them without having used its CPU seconds says
    something about the machine and not about the program: it is no zero but a timeout."""
    cpu_s: Annotated[int, Field(ge=1, le=600)] = 5
    """CPU seconds for each process of a program; at more it is wrong."""
    memory_bytes: Annotated[int, Field(ge=64 * _MIB)] = 512 * _MIB
    """Address space of each process of a program."""
    num_processes: Annotated[int, Field(ge=1, le=1024)] = 8
    """Processes and threads of a program, its first among them."""
    file_bytes: Annotated[int, Field(ge=0)] = 16 * _MIB
    """Longest file that a program can write, and all that its private /tmp holds together."""
    num_files: Annotated[int, Field(ge=16, le=65_536)] = 64
    """Open files of each process of a program."""
    output_bytes: Annotated[int, Field(ge=0, le=1024 * _MIB)] = _MIB
    """How much of a program's output is read; at more it is killed."""

    @property
    def longest_s(self) -> float:
        """Seconds that a program with its tests takes at most, until all of it is ended."""
        return self.wall_s + _ENDING_S
