"""A sandbox with a kernel of its own, through gVisor's `runsc`, as an OCI bundle."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from functools import cache
from pathlib import Path

from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.interpreter import Interpreter


@cache
def runsc() -> str:
    """Where `runsc` is. Raises ValueError, in one sentence, where it is missing."""
    path = shutil.which("runsc")
    if path is None:
        raise ValueError(
            "sandbox.kind is gvisor, and runsc is not here: install it (https://gvisor.dev/docs/user_guide/install), "
            "or say sandbox.kind: bubblewrap"
        )
    return path


def command(
    stack: contextlib.ExitStack, config: SandboxConfig, python: Interpreter, arguments: tuple[str, ...], fds: tuple[int, ...]
) -> list[str]:
    """The command that runs a Python with `arguments`; `stack` removes the bundle after the start.

    Flags: https://gvisor.dev/docs/user_guide/ and `runsc run -help`.
    """
    # TODO placeholder
    raise NotImplementedError
