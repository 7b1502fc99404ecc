"""The program process: sets the limits, then runs a program as `__main__`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from rewards.sandbox.inside import limits, wire


def main() -> None:
    """Run with arguments: the limits, the descriptor of the program, the pipe that signals the start."""
    spec, program_fd, started_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    source = wire.read_all(program_fd)
    limits.apply(spec)
    os.write(started_fd, b"1")
    os.close(started_fd)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program"]
    exec(compile(source, "program", "exec"), module.__dict__)
