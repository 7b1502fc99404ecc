"""Injection of one fault: waiting for its trigger, injecting it, and telling when its target has recovered."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints.selection import read_position
from actors.run_log import CHECKPOINTS, METRICS, Event
from benchmarks.processes.child_process import ChildProcess
from benchmarks.processes.run_processes import Process, Role, RunProcesses
from deploy.errors import UserError
from deploy.runs.scale_request import send_request
from tests.chaos.clock import MovableClock
from tests.chaos.faults import ROLES, Fault, FaultKind, Target, Trigger
from tests.chaos.platforms import Cluster, SmallDisk
from tests.chaos.record import trained_files
from tests.simulated.machine_pair import MachinePair

_POLL_S = 0.001
_COLLECTIVE_S = 1.0
_TERM_S = 5.0
_SCALE_TIMEOUT_S = 15.0
_SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP, FaultKind.TERM: signal.SIGTERM}


class NotPossibleError(Exception):
    """The fault cannot be injected now, or on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a fault can hit."""

    processes: RunProcesses
    """The run's processes."""
    run_dir: Path
    """The run directory."""
    sizes: Mapping[Role, int]
    """Number of processes of roles with several."""
    disk: SmallDisk | None
    """File system of the run directory; None if it could not be mounted."""
    clock: MovableClock | None
    """Wall clock; None unless the platform has one."""
    cluster: Cluster | None
    """Ray cluster of this machine; None unless the platform has one."""
    machines: MachinePair | None = None
    """Two machines with a Ray cluster; None unless they are the platform."""


class EventTail:
    """The events of a run directory as they are written."""

    def __init__(self, run_dir: Path) -> None:
        """Start at the first event."""
        self._path, self._offset = run_dir / METRICS, 0

    def new(self) -> list[Event]:
        """Return the events since the last call, without an unfinished line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                written = file.read()
        except FileNotFoundError:
            return []
        whole = written[: written.rfind(b"\n") + 1]
        self._offset += len(whole)
        events: list[Event] = []
        for line in whole.splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
        return events


def wait_for(
    trigger: Trigger, run_dir: Path, checkpoint_every_rounds: int, is_over: Callable[[], bool], timeout_s: float
) -> bool:
    """Wait for a trigger. Returns False if the run `is_over` or `timeout_s` passes first."""
    tail = EventTail(run_dir)
    tail.new()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not is_over():
        match trigger:
            case Trigger.PUBLISHED:
                rounds = [event["round"] + 1 for event in tail.new() if event["event"] == "round"]
                if any(done % checkpoint_every_rounds == 0 for done in rounds):
                    return True
            case Trigger.CHECKPOINT:
                if _is_writing(run_dir / CHECKPOINTS):
                    return True
            case Trigger.WRITTEN:
                if any(event["event"] == "checkpoint" for event in tail.new()):
                    return True
            case Trigger.ANY | Trigger.COLLECTIVE:
                return True
        time.sleep(_POLL_S)
    return False


class Injection:
    """A fault in progress."""

    def __init__(self, fault: Fault, surroundings: Surroundings, driver: ChildProcess) -> None:
        """Choose the process before the trigger, which may last less than the search. Raises NotPossibleError."""
        self._fault, self._surroundings, self._driver = fault, surroundings, driver
        self.victim, self.began_s = "", 0.0
        self.ended_s: float | None = None
        self._process: Process | None = None
        self._role = ROLES.get(fault.target)
        if self._role is not None and fault.target is not Target.POOL:
            self._process = self._choose(self._role)

    def inject(self) -> None:
        """Inject the fault. Raises NotPossibleError."""
        self.began_s = time.monotonic()
        fault, surroundings = self._fault, self._surroundings
        match fault.target:
            case Target.DISK:
                if surroundings.disk is None:
                    raise NotPossibleError("the run directory has no file system of its own, which needs root")
                surroundings.disk.fill()
                self.victim = str(surroundings.disk.directory)
            case Target.CLOCK:
                assert surroundings.clock is not None, "its platform has one"
                surroundings.clock.jump(fault.seconds or 0.0)
                self.victim = "the run's wall clock"
            case Target.BYTES:
                self.victim = _flip_newest(surroundings.run_dir / CHECKPOINTS, fault.choice)
                self._living_process().signal_and_wait(signal.SIGKILL)
            case Target.POOL:
                self.victim = self._scale_away()
            case Target.MACHINE | Target.LINK:
                assert surroundings.machines is not None, "its platform has them"
                hit = surroundings.machines.lose if fault.target is Target.MACHINE else surroundings.machines.cut_link
                self.victim = hit()
            case Target.DRIVER:
                self.victim = f"process {self._driver.pid}"
                self._driver.signal(_SIGNALS[fault.kind])
            case _:
                self._signal()
        if fault.seconds is None or fault.kind is FaultKind.JUMP:
            self.ended_s = self.began_s

    def has_ended(self) -> bool:
        """Whether the fault is over. Ends it when its duration has passed."""
        if self.ended_s is None and time.monotonic() >= self.began_s + (self._fault.seconds or 0.0):
            self._undo()
            self.ended_s = time.monotonic()
        return self.ended_s is not None

    def has_recovered(self, driver: ChildProcess) -> bool:
        """Whether the role has all its processes, or all roles after the loss of a machine, and none is stopped."""
        fault = self._fault
        if fault.target is Target.DRIVER:
            return driver is not self._driver or (fault.kind is not FaultKind.KILL and self._is_settled())
        processes, sizes = self._surroundings.processes, self._surroundings.sizes
        if fault.target in (Target.MACHINE, Target.LINK):
            return processes.are_complete(sizes)
        if self._role is None:
            return True
        if fault.kind is FaultKind.TERM and not self._is_settled():
            return False
        return processes.are_complete({self._role: sizes.get(self._role, 1)})

    def end(self) -> None:
        """End the fault, also one that lasts for ever."""
        if self.ended_s is None:
            self._undo()
            self.ended_s = time.monotonic()
        elif self._fault.kind is FaultKind.STOP and self._process is not None:
            self._process.signal(signal.SIGCONT)

    def _is_settled(self) -> bool:
        """Whether a process has ended of a signal that it may catch, or will not any more."""
        has_ended = self._process is not None and not self._process.is_alive
        return has_ended or time.monotonic() > self.began_s + _TERM_S

    def _signal(self) -> None:
        fault, cluster = self._fault, self._surroundings.cluster
        if fault.target is Target.GCS_ON_REDIS:
            assert cluster is not None, "its platform has one"
            cluster.save_gcs_command()
        process = self._living_process()
        self.victim = f"{_program(process.title)}, process {process.pid}"
        if fault.trigger is Trigger.COLLECTIVE:
            process.signal_and_wait(signal.SIGSTOP)
            time.sleep(_COLLECTIVE_S)
        self.began_s = time.monotonic()
        process.signal_and_wait(_SIGNALS[fault.kind])

    def _scale_away(self) -> str:
        """Scale to one sampler, or to one more if there is room."""
        if self._fault.choice >= 0.5:
            with suppress(NotPossibleError):
                return self._scale(self._surroundings.sizes[Role.SAMPLER] + 1)
        return self._scale(1)

    def _scale(self, size: int) -> str:
        """Scale the samplers; returns the change in words. Raises NotPossibleError."""
        if self._driver.status is not None:
            raise NotPossibleError("the run has ended")
        try:
            answer = send_request(self._surroundings.run_dir, {"samplers": size}, _SCALE_TIMEOUT_S)
        except UserError as error:
            raise NotPossibleError(str(error)) from error
        if answer.refusal:
            raise NotPossibleError(answer.refusal)
        before, after = answer.changes["samplers"]
        return f"samplers: {before}, then {after}"

    def _undo(self) -> None:
        fault, surroundings = self._fault, self._surroundings
        if fault.target is Target.POOL:
            # A run that has ended meanwhile is resumed with the recipe's number.
            with suppress(NotPossibleError):
                self._scale(surroundings.sizes[Role.SAMPLER])
        if fault.target is Target.DISK and surroundings.disk is not None:
            surroundings.disk.empty()
        elif fault.kind is FaultKind.STOP and fault.target is Target.DRIVER:
            self._driver.signal(signal.SIGCONT)
        elif fault.kind is FaultKind.STOP and self._process is not None:
            self._process.signal(signal.SIGCONT)
        if surroundings.cluster is not None and fault.target is Target.GCS_ON_REDIS:
            surroundings.cluster.restart_gcs()
        if surroundings.machines is not None and fault.target is Target.MACHINE:
            surroundings.machines.replace()
        if surroundings.machines is not None and fault.target is Target.LINK:
            surroundings.machines.mend_link()

    def _living_process(self) -> Process:
        """Return the chosen process, or another one if it has ended meanwhile."""
        assert self._role is not None, "the target has a role"
        if self._process is None or not self._process.is_alive:
            self._process = self._choose(self._role)
        return self._process

    def _choose(self, role: Role) -> Process:
        candidates = self._surroundings.processes.of_role(role)
        if not candidates:
            raise NotPossibleError(f"there is no {role} now")
        return candidates[int(self._fault.choice * len(candidates))]


def _is_writing(checkpoints: Path) -> bool:
    try:
        return any(name.startswith(".") and name.endswith(".partial") for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False


def _flip_newest(checkpoints: Path, choice: float) -> str:
    """Flip a bit of the newest checkpoint's weights; returns its name."""
    found = []
    for directory in checkpoints.glob("[!.]*/"):
        with suppress(ValueError, OSError):
            found.append((read_position(directory).policy_version, directory))
    version, directory = max(found, default=(0, checkpoints))
    if not version:
        raise NotPossibleError("there is only the initial checkpoint yet")
    path = trained_files(directory)[0]
    place = int(choice * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    return directory.name


def _program(title: str) -> str:
    """Return the first word of a command line, such as `ray::SamplerWorker.generate`, without its directory."""
    words = title.split()
    return re.sub(r".*/", "", words[0]) if words else "?"
