"""The processes of one run, found from outside: by a mark in the environment that they inherit, never by name alone.

Another Ray on the machine has no such mark, and is never touched.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from deploy.chaos.faults import Target
from deploy.orphans import is_marked, with_descendants

MARK = "D1_CHAOS_MARK"
_PROC = Path("/proc")
_TAKES_EFFECT_S = 30.0
# Ray writes the class and the method that runs over a worker's command line.
_TITLES = {
    Target.SAMPLER: r"ray::SamplerWorker\b",
    Target.GRADER: r"ray::GraderWorker\b",
    Target.LEARNER: r"ray::RayTrainWorker\b",
    Target.CONTROLLER: r"ray::TrainController\b",
    Target.COORDINATOR: r"ray::Coordinator\b",
    Target.STORE: r"ray::WeightStore\b",
    Target.REGISTRY: r"ray::RegistryServer\b",
    Target.RAYLET: r"\S*/raylet/raylet ",
    Target.GCS: r"\S*/gcs/gcs_server ",
    Target.GCS_ON_REDIS: r"\S*/gcs/gcs_server ",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process as the kernel shows it. Two with the same id and start are the same."""

    pid: int
    """Its id."""
    started: int
    """Clock ticks from the machine's start to its own: the id alone is used again."""
    parent: int
    """Its parent's id."""
    state: str
    """One letter: T is stopped, Z has ended."""
    title: str
    """Its command line, or what it has written over that."""

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from all others, earlier ones too."""
        return self.pid, self.started

    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self._state_now() != ""

    def signal(self, number: Signals) -> None:
        """Send it a signal; nothing happens when it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def strike(self, number: Signals) -> None:
        """Send it a signal, and wait until one that it cannot catch has had its effect: a busy machine takes its time,
        and whoever looked meanwhile would find it well. Raises TimeoutError."""
        self.signal(number)
        deadline = time.monotonic() + _TAKES_EFFECT_S
        while not self._shows(number):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} shows no effect of {number.name} after {_TAKES_EFFECT_S:g} s")
            time.sleep(0.005)

    def _shows(self, number: Signals) -> bool:
        match number:
            case Signals.SIGKILL:
                return self._state_now() == ""
            case Signals.SIGSTOP:
                return self._state_now() in ("", "T")
        return True

    def _state_now(self) -> str:
        """As `state`; empty when it has ended."""
        now = _read(self.pid)
        return now.state if now is not None and now.key == self.key and now.state not in "ZX" else ""


class Family:
    """All processes that a marked one started, and theirs."""

    def __init__(self, mark: str) -> None:
        """`mark` goes into the environment of whatever is started: `{MARK: mark}`."""
        self.mark = mark
        self._known: set[tuple[int, int]] = set()
        # Older than the family: to look into each of them again takes most of the time.
        self._others = {process.key for process in _all()}

    def living(self) -> list[Process]:
        """Those that have not ended, by id."""
        found = [process for process in _all() if process.key not in self._others]
        ours = {
            process.pid for process in found if process.key in self._known or is_marked(process.pid, MARK, self.mark)
        }
        # Some write over their environment; their parents have not.
        ours = with_descendants(ours, {process.pid: process.parent for process in found})
        members = [process for process in found if process.pid in ours]
        self._known |= {process.key for process in members}
        return sorted((process for process in members if process.state not in "ZX"), key=lambda process: process.pid)

    def of_role(self, target: Target) -> list[Process]:
        """Those that play a role. The driver is known to who started it, and is not among them."""
        return [process for process in self.living() if _plays(process, target)]

    def has_working(self, sizes: Mapping[Target, int]) -> bool:
        """Whether each role has so many processes, none of which stands still."""
        working = [process for process in self.living() if process.state != "T"]
        return all(sum(_plays(process, role) for process in working) >= size for role, size in sizes.items())

    def kill(self, timeout_s: float = 20.0) -> None:
        """End all of them; returns when they have ended or `timeout_s` is over."""
        deadline = time.monotonic() + timeout_s
        while (left := self.living()) and time.monotonic() < deadline:
            for process in left:
                process.signal(Signals.SIGKILL)
            time.sleep(0.05)


def _all() -> list[Process]:
    return [process for name in os.listdir(_PROC) if name.isdigit() and (process := _read(int(name)))]


def _plays(process: Process, target: Target) -> bool:
    return re.match(_TITLES[target], process.title) is not None


def _read(pid: int) -> Process | None:
    """None when it has ended meanwhile."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        title = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    # The second field is a name in parentheses, which may have any characters.
    fields = stat[stat.rindex(")") + 2 :].split()
    return Process(pid=pid, started=int(fields[19]), parent=int(fields[1]), state=fields[0], title=title.strip())
