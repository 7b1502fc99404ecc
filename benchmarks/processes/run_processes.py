"""The processes of one run, identified by an inherited environment variable.

Processes of another Ray on the machine do not have the variable and are never touched.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import Signals

from deploy.orphans import is_marked

MARK = "D1_RUN_MARK"
"""Environment variable that identifies the processes of a run."""
_PROC = Path("/proc")
_SIGNAL_TIMEOUT_S = 30.0


class Role(StrEnum):
    """Role of a process in a run."""

    SAMPLER = "sampler"
    GRADER = "grader"
    LEARNER = "learner"
    CONTROLLER = "controller"
    """Ray Train's controller."""
    COORDINATOR = "coordinator"
    STORE = "store"
    """The weight store."""
    REGISTRY = "registry"
    RAYLET = "raylet"
    GCS = "gcs"


# Ray replaces a worker's command line by its actor's class and method.
_TITLES = {
    Role.SAMPLER: r"ray::SamplerWorker\b",
    Role.GRADER: r"ray::GraderWorker\b",
    Role.LEARNER: r"ray::RayTrainWorker\b",
    Role.CONTROLLER: r"ray::TrainController\b",
    Role.COORDINATOR: r"ray::Coordinator\b",
    Role.STORE: r"ray::WeightStore\b",
    Role.REGISTRY: r"ray::RegistryServer\b",
    Role.RAYLET: r"\S*/raylet/raylet ",
    Role.GCS: r"\S*/gcs/gcs_server ",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process, as /proc shows it."""

    pid: int
    """Process id."""
    started: int
    """Start time in clock ticks since boot; distinguishes processes that reuse an id."""
    parent: int
    """Process id of the parent."""
    state: str
    """State letter: T is stopped, Z a zombie."""
    title: str
    """Command line, which the process may have replaced."""

    @property
    def key(self) -> tuple[int, int]:
        """Unique identity, also among past processes."""
        return self.pid, self.started

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._current_state() != ""

    def signal(self, number: Signals) -> None:
        """Send a signal; ignored if the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_and_wait(self, number: Signals) -> None:
        """Send a signal, and wait until SIGKILL or SIGSTOP has taken effect. Raises TimeoutError.

        On a busy machine the process would otherwise still look healthy.
        """
        self.signal(number)
        deadline = time.monotonic() + _SIGNAL_TIMEOUT_S
        expected = {Signals.SIGKILL: ("",), Signals.SIGSTOP: ("", "T")}.get(number)
        while expected is not None and self._current_state() not in expected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} ignores {number.name} for {_SIGNAL_TIMEOUT_S:g} s")
            time.sleep(0.005)

    def _current_state(self) -> str:
        """Return the current state letter; empty if the process has ended."""
        now = _read(self.pid)
        return now.state if now is not None and now.key == self.key and now.state not in "ZX" else ""


class RunProcesses:
    """All processes started with a mark in their environment, and their descendants."""

    def __init__(self, mark: str) -> None:
        """`mark` is unique. The run is started with `{MARK: mark}` in its environment, after this call."""
        self.mark = mark
        self._known: set[tuple[int, int]] = set()
        # Older than the run: reading their environments would take most of the time.
        self._others = {process.key for process in _all()}

    def living(self) -> list[Process]:
        """Return the processes that have not ended, by id."""
        found = [process for process in _all() if process.key not in self._others]
        ours = {
            process.pid for process in found if process.key in self._known or is_marked(process.pid, MARK, self.mark)
        }
        # Some processes overwrite their environment, but their parents do not.
        while children := {process.pid for process in found if process.parent in ours} - ours:
            ours |= children
        members = [process for process in found if process.pid in ours]
        self._known |= {process.key for process in members}
        return sorted((process for process in members if process.state not in "ZX"), key=lambda process: process.pid)

    def of_role(self, role: Role) -> list[Process]:
        """Return the living processes of a role."""
        return [process for process in self.living() if _has_role(process, role)]

    def are_complete(self, sizes: Mapping[Role, int]) -> bool:
        """Whether each role has so many processes that are not stopped."""
        running = [process for process in self.living() if process.state != "T"]
        return all(sum(_has_role(process, role) for process in running) >= size for role, size in sizes.items())

    def kill(self, timeout_s: float = 20.0) -> None:
        """Kill all processes; returns when they have ended or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left := self.living()) and time.monotonic() < deadline:
            for process in left:
                process.signal(Signals.SIGKILL)
            time.sleep(0.05)


def _all() -> list[Process]:
    return [process for name in os.listdir(_PROC) if name.isdigit() and (process := _read(int(name)))]


def _has_role(process: Process, role: Role) -> bool:
    return re.match(_TITLES[role], process.title) is not None


def _read(pid: int) -> Process | None:
    """Read a process from /proc; None if it has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        title = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    # The second field is a name in parentheses, which may contain any character.
    fields = stat[stat.rindex(")") + 2 :].split()
    return Process(pid=pid, started=int(fields[19]), parent=int(fields[1]), state=fields[0], title=title.strip())
