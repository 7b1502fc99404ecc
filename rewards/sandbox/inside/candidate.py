"""The candidate process: runs a program as the module `solution`, then serves the judge's calls.

It has no access to the tests.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from rewards.sandbox.inside import limits, wire
from rewards.sandbox.inside.peer import Peer, PeerGone


def main() -> None:
    """Run with arguments: the limits, the descriptor of the program, the socket to the judge."""
    spec, program_fd, channel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    source = wire.read_all(program_fd)
    limits.apply(spec)
    peer = Peer(channel, is_allowed=lambda name, args: True)  # noqa: ARG005
    peer.send(("ready",))
    wire.redirect_stdio_to_null()
    sys.argv = ["solution"]
    module = ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(source, "solution", "exec"), module.__dict__)
    except BaseException as error:
        peer.send(("failed", f"{type(error).__name__}: {error}"[:300]))
    else:
        bound = [name for name, value in vars(module).items() if not name.startswith("__") and _may_be_named(value)]
        peer.send(("loaded", module, tuple(bound)))
    try:
        peer.serve_forever()
    except PeerGone:
        # Not `sys.exit`, which would run exit hooks of the program.
        os._exit(0)


def _may_be_named(value: object) -> bool:
    """Return whether tests may use this name of the program.

    Excluded are imported modules and their exceptions. Tests import what they use of those themselves, and an exception
    class exists in their process only after that.
    """
    if isinstance(value, type) and issubclass(value, BaseException):
        return value.__module__ in ("solution", "builtins")
    return not isinstance(value, ModuleType)
