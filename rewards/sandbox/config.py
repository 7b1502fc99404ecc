"""Configuration of the sandbox: its kind and its resource limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_MIB = 2**20
# Time to report the results so far and to kill all processes.
_ENDING_S = 10.0


class SandboxConfig(BaseModel):
    """How the code of a completion is run. The defaults suffice for every reference solution of HumanEval."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["bubblewrap", "gvisor", "none"] = "bubblewrap"
    """What isolates a program. `bubblewrap`: kernel namespaces, through `bwrap`. `gvisor`: a separate user-space
    kernel, through `runsc`. `none`: only resource limits; the program can read, write and reach everything that d1
    can."""
    wall_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Wall-clock seconds for a program with its tests. If they run out before half of `cpu_s` was used, the machine was
    overloaded: the result is a timeout, not a zero."""
    cpu_s: Annotated[int, Field(ge=1, le=600)] = 5
    """CPU seconds for each process of a program; a program that needs more is wrong."""
    memory_bytes: Annotated[int, Field(ge=64 * _MIB)] = 512 * _MIB
    """Address space of each process of a program."""
    num_processes: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum processes and threads of a program, including its first."""
    file_bytes: Annotated[int, Field(ge=0)] = 16 * _MIB
    """Maximum size of a file that a program writes, and of its private /tmp in total."""
    num_files: Annotated[int, Field(ge=16, le=65_536)] = 64
    """Open files of each process of a program."""
    output_bytes: Annotated[int, Field(ge=0, le=1024 * _MIB)] = _MIB
    """Maximum output of a program; it is killed if it writes more."""

    @property
    def max_s(self) -> float:
        """Maximum seconds for a program with its tests, until all its processes are dead."""
        return self.wall_s + _ENDING_S
