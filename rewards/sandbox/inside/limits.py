"""Resource limits of a sandboxed process, set before it runs untrusted code."""

from __future__ import annotations

import os
import resource


def apply(spec: str) -> None:
    """Set the limits of this process and its children from a spec: `name=number`, separated by commas.

    Raises OSError or ValueError if the system refuses.
    """
    values = {name: int(number) for name, _, number in (part.partition("=") for part in spec.split(","))}
    if "uid" in values:
        # The process limit does not apply to root.
        os.setgroups([])
        os.setresgid(values["uid"], values["uid"], values["uid"])
        os.setresuid(values["uid"], values["uid"], values["uid"])
    # The soft limit equals the hard one, so that SIGKILL is sent. SIGXCPU can be caught, and does nothing to process 1.
    _limit(resource.RLIMIT_CPU, values["cpu_s"])
    _limit(resource.RLIMIT_AS, values["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, values["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, values["files"])
    _limit(resource.RLIMIT_NPROC, values["processes"])
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _limit(nothing, 0)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
