"""Carrying a fault out, and telling when the role that it hit is there again."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints.selection import read_position
from actors.run_log import CHECKPOINTS
from deploy.chaos.clock import MovableClock
from deploy.chaos.driver import Driver
from deploy.chaos.faults import Fault, Harm, Moment, Target
from deploy.chaos.places import Cluster, SmallDisk
from deploy.chaos.targets import Family, Process
from deploy.errors import UserError
from deploy.runs.scale_request import send_request
from learner.model.checkpoint_files import ADAPTER, WEIGHTS

_COLLECTIVE_S = 1.0
_TERM_S = 5.0
# Whose processes tell that a part of the run is whole again.
_STOOD_FOR = {Target.BYTES: Target.LEARNER, Target.POOL: Target.SAMPLER}
_SCALED_WITHIN_S, _FEWER = 15.0, 0.5
_NUMBERS = {Harm.KILL: signal.SIGKILL, Harm.STOP: signal.SIGSTOP, Harm.TERM: signal.SIGTERM}


class NotPossibleError(Exception):
    """There is nothing to do this to, now or on this machine; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a fault can be done to."""

    family: Family
    """The run's processes."""
    run_dir: Path
    """Its directory."""
    sizes: Mapping[Target, int]
    """How many processes a role has; 1 where it is not said."""
    disk: SmallDisk | None
    """Its file system, where it has one of its own."""
    clock: MovableClock | None
    """Its clock, likewise."""
    cluster: Cluster | None
    """Its cluster, likewise."""


class Strike:
    """One fault under way."""

    def __init__(self, fault: Fault, scene: Scene, driver: Driver) -> None:
        """Choose whom it will hit: to look for him takes longer than some moments last. Raises NotPossibleError."""
        self._fault, self._scene, self._driver = fault, scene, driver
        self.victim, self.at_s = "", 0.0
        self.over_at_s: float | None = None
        self._process: Process | None = None
        if fault.target is Target.BYTES:
            self._process = self._choose(Target.LEARNER)
        elif fault.target not in (Target.DISK, Target.CLOCK, Target.DRIVER, Target.POOL):
            self._process = self._choose(fault.target)

    def carry_out(self) -> None:
        """Do it. Raises NotPossibleError."""
        self.at_s = time.monotonic()
        self._do()
        if self._fault.seconds is None or self._fault.harm is Harm.JUMP:
            self.over_at_s = self.at_s

    @property
    def is_over(self) -> bool:
        """Whether it lasts no longer; ends it when its time has come."""
        if self.over_at_s is None and time.monotonic() >= self.at_s + (self._fault.seconds or 0.0):
            self._undo()
            self.over_at_s = time.monotonic()
        return self.over_at_s is not None

    def is_back(self, driver: Driver) -> bool:
        """Whether the role has as many processes as it should, none of which stands still."""
        fault = self._fault
        if fault.target is Target.DRIVER:
            return driver is not self._driver or (fault.harm is not Harm.KILL and self._has_had_time())
        role = _STOOD_FOR.get(fault.target, fault.target)
        if role in (Target.DISK, Target.CLOCK):
            return True
        if fault.harm is Harm.TERM and not self._has_had_time():
            return False
        return self._scene.family.has_working({role: self._scene.sizes.get(role, 1)})

    def end(self) -> None:
        """Let nothing of it last, whatever happened."""
        if self.over_at_s is None:
            self._undo()
            self.over_at_s = time.monotonic()
        elif self._fault.harm is Harm.STOP and self._process is not None:
            self._process.signal(signal.SIGCONT)

    def _has_had_time(self) -> bool:
        """A process may end of a signal that it can catch, or not: after some seconds it will not."""
        is_gone = self._process is not None and not self._process.is_there()
        return is_gone or time.monotonic() > self.at_s + _TERM_S

    def _do(self) -> None:
        fault, scene = self._fault, self._scene
        match fault.target:
            case Target.DISK:
                if scene.disk is None:
                    raise NotPossibleError("the run directory has no small file system of its own (that takes root)")
                scene.disk.fill()
                self.victim = str(scene.disk.directory)
            case Target.CLOCK:
                assert scene.clock is not None, "its setting has one"
                scene.clock.jump(fault.seconds or 0.0)
                self.victim = "the run's wall clock"
            case Target.BYTES:
                self.victim = _flip_newest(scene.run_dir / CHECKPOINTS, fault.choice)
                self._victim_of(Target.LEARNER).strike(signal.SIGKILL)
            case Target.POOL:
                self.victim = self._scale_away()
            case Target.DRIVER:
                self.victim = f"process {self._driver.pid}"
                self._driver.signal(_NUMBERS[fault.harm])
            case _:
                self._signal()

    def _signal(self) -> None:
        fault, scene = self._fault, self._scene
        if fault.target is Target.GCS_ON_REDIS:
            if scene.cluster is None:
                raise NotPossibleError("redis-server is missing (Debian: apt install redis-server)")
            scene.cluster.note_gcs()
        process = self._victim_of(fault.target)
        self.victim = f"{_short(process.title)}, process {process.pid}"
        if fault.moment is Moment.COLLECTIVE:
            process.strike(signal.SIGSTOP)
            time.sleep(_COLLECTIVE_S)
        self.at_s = time.monotonic()
        process.strike(_NUMBERS[fault.harm])

    def _scale_away(self) -> str:
        """To one sampler or to one more, where there is room for that."""
        if self._fault.choice >= _FEWER:
            with suppress(NotPossibleError):
                return self._scale(self._scene.sizes[Target.SAMPLER] + 1)
        return self._scale(1)

    def _scale(self, size: int) -> str:
        """Have so many samplers; what was done, in words."""
        if self._driver.status is not None:
            raise NotPossibleError("the run has ended")
        try:
            # Nobody reads what the run prints meanwhile, so no longer than a promise of it may take.
            answer = send_request(self._scene.run_dir, {"samplers": size}, _SCALED_WITHIN_S)
        except UserError as error:
            raise NotPossibleError(str(error)) from error
        if answer.refusal:
            raise NotPossibleError(answer.refusal)
        before, after = answer.changes["samplers"]
        return f"samplers: {before}, then {after}"

    def _undo(self) -> None:
        fault, scene = self._fault, self._scene
        if fault.target is Target.POOL:
            # A run that has ended meanwhile begins again with as many as the recipe says.
            with suppress(NotPossibleError):
                self._scale(scene.sizes[Target.SAMPLER])
        if fault.target is Target.DISK and scene.disk is not None:
            scene.disk.empty()
        elif fault.harm is Harm.STOP and fault.target is Target.DRIVER:
            self._driver.signal(signal.SIGCONT)
        elif fault.harm is Harm.STOP and self._process is not None:
            self._process.signal(signal.SIGCONT)
        if scene.cluster is not None and fault.target is Target.GCS_ON_REDIS:
            scene.cluster.restart_gcs()

    def _victim_of(self, target: Target) -> Process:
        """Who was chosen; another one if he has ended meanwhile."""
        if self._process is None or not self._process.is_there():
            self._process = self._choose(target)
        return self._process

    def _choose(self, target: Target) -> Process:
        candidates = self._scene.family.of_role(target)
        if not candidates:
            raise NotPossibleError(f"there is no {target} now")
        return candidates[int(self._fault.choice * len(candidates))]


def _flip_newest(checkpoints: Path, choice: float) -> str:
    """Flip a byte of the newest checkpoint's weights; its name."""
    found = []
    for directory in checkpoints.glob("[!.]*/"):
        try:
            found.append((read_position(directory).policy_version, directory))
        except (ValueError, OSError):
            continue
    version, directory = max(found, default=(0, checkpoints))
    if not version:
        raise NotPossibleError("there is no checkpoint beside the initial one yet")
    path = directory / (ADAPTER if (directory / ADAPTER).is_file() else WEIGHTS)
    place = int(choice * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    return directory.name


def _short(title: str) -> str:
    """`ray::SamplerWorker.generate`, or the name of a program."""
    words = title.split()
    return re.sub(r".*/", "", words[0]) if words else "?"
