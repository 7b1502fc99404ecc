"""One disturbed run: `d1 train` as a user has it, faults one after another, and `--resume` where it ended."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from actors.run_log import Event, read_events
from deploy.chaos.clock import MovableClock
from deploy.chaos.driver import Driver
from deploy.chaos.expectations import FaultOutcome
from deploy.chaos.faults import Fault, Setting, Target
from deploy.chaos.moments import EventTail, wait_for
from deploy.chaos.places import Cluster, SmallDisk, continued
from deploy.chaos.record import Blow, Drive, RunRecord, read_history
from deploy.chaos.strike import NotPossibleError, Scene, Strike
from deploy.chaos.targets import MARK, Family

Say = Callable[[str], None]
_PROGRESS = {"sft", "sft_eval", "round", "evaluation", "checkpoint", "phase_end", "done"}
_POLL_S = 0.1
_MAX_VAIN_DRIVES = 3
# Until its first step: `d1 train` gives up by itself before.
_START_S = 600.0
_ROLES = (Target.SAMPLER, Target.GRADER, Target.LEARNER, Target.COORDINATOR, Target.STORE, Target.CONTROLLER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosPlan:
    """What all runs of a session have in common."""

    command: tuple[str, ...]
    """`d1 train RECIPE KEY=VALUE ...`, without name and directory."""
    sizes: Mapping[Target, int]
    """Processes of each role that has several."""
    checkpoint_every_rounds: int
    """The recipe's."""
    patience_s: float
    """How long a run may make no progress before it counts as stuck."""
    leftover_s: float
    """How long after the end of `d1 train`, however that ended, its processes may take to end."""
    disk_bytes: int
    """Size of the file system of its own that a run directory gets."""


class DisturbedRun:
    """A run, its `d1 train` and its faults."""

    def __init__(self, name: str, setting: Setting, directory: Path, plan: ChaosPlan, say: Say) -> None:
        """A run that will be kept in `directory/name`, with what it printed beside it."""
        self._name, self._setting, self._plan, self._say = name, setting, plan, say
        self._kept, self._family = directory / name, Family(secrets.token_hex(8))
        self._directory = directory / f".{name}"
        self._run_dir = self._directory / name
        self._drives: list[Drive] = []
        self._blows: list[Blow] = []
        self._rounds_done = 0
        self._progress_at_s = 0.0
        self._is_done = False
        self._was_helped = False
        self._num_vain = 0

    def go(self, faults: deque[Fault]) -> RunRecord:
        """Carry out faults, taking them from the left, until there are none or the run is done; then let it end."""
        with ExitStack() as stack:
            self._scene, environment = self._set_up(stack)
            self._environment = environment
            stack.callback(self._family.kill)
            stack.enter_context(continued(self._family))
            self._tail = EventTail(self._run_dir)
            self._start()
            while faults and self._get_ready():
                self._one(faults)
            self._finish()
            history = read_history(self._run_dir)
            self._keep()
        return RunRecord(
            name=self._name,
            setting=self._setting,
            drives=tuple(self._drives),
            blows=tuple(self._blows),
            history=history,
        )

    def _keep(self) -> None:
        """Copy the run to where it stays: its file system may be in memory."""
        if self._run_dir.is_dir():
            shutil.copytree(self._run_dir, self._kept)
        lines = sorted((line for drive in self._drives for line in drive.lines), key=lambda line: line.at_s)
        began_s = self._drives[0].began_s
        text = "".join(f"{line.at_s - began_s:8.2f}  {line.text}\n" for line in lines)
        self._kept.with_suffix(".log").write_text(text, encoding="utf-8")

    def _set_up(self, stack: ExitStack) -> tuple[Scene, dict[str, str]]:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment[MARK] = self._family.mark
        disk = clock = cluster = None
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        try:
            disk = SmallDisk(self._directory, self._plan.disk_bytes)
            stack.callback(disk.close)
        except OSError:
            self._directory.mkdir(parents=True, exist_ok=True)
        if self._setting is Setting.MOVABLE_CLOCK:
            clock = MovableClock(self._kept.with_suffix(".clock"))
            environment |= clock.environment
        if self._setting is Setting.CLUSTER and Cluster.is_possible():
            cluster = Cluster(self._family)
            stack.callback(cluster.close)
            environment |= cluster.environment
        scene = Scene(
            family=self._family, run_dir=self._run_dir, sizes=self._plan.sizes, disk=disk, clock=clock, cluster=cluster
        )
        return scene, environment

    # `d1 train`.

    def _start(self) -> None:
        words = [*self._plan.command, f"name={self._name}", f"runs_dir={self._directory}"]
        words += ["--resume-or-start"] if self._drives else []
        self._driver = Driver(words, self._environment)
        self._progress_at_s = self._driver.began_s

    def _look(self) -> list[Event]:
        """The new events; notes what they say of the run."""
        events = self._tail.new()
        for event in events:
            if event["event"] in _PROGRESS:
                self._progress_at_s, self._num_vain = time.monotonic(), 0
            if event["event"] == "round":
                self._rounds_done = event["round"] + 1
            self._is_done |= event["event"] == "done"
        return events

    def _clean_up(self) -> None:
        """Note how a `d1 train` ended, and end what it left."""
        driver = self._driver
        status = driver.status
        assert status is not None, "it has ended"
        assert driver.ended_s is not None, "whoever looks at the status notes the time"
        with continued(self._family):
            pass
        leftovers: list[str] = []
        if self._scene.cluster is None:
            deadline = time.monotonic() + self._plan.leftover_s
            while (left := self._family.living()) and time.monotonic() < deadline:
                time.sleep(0.1)
            leftovers = [process.title[:80] for process in left]
            self._family.kill()
        driver.close()
        self._drives.append(
            Drive(
                began_s=driver.began_s,
                ended_s=driver.ended_s,
                status=status,
                was_helped=self._was_helped,
                lines=driver.lines,
                leftovers=tuple(leftovers),
            )
        )
        self._was_helped = False
        self._look()

    def _resume(self) -> None:
        self._clean_up()
        self._num_vain += 1
        self._start()

    def _is_stuck_since(self, since_s: float) -> bool:
        """Whether the run has kept everybody waiting for longer than it may, from some moment on."""
        is_starting = self._progress_at_s <= self._driver.began_s
        limit_s = max(self._plan.patience_s, _START_S if is_starting else 0.0)
        return time.monotonic() - since_s > limit_s

    def _help(self) -> None:
        """The run is stuck: end it, so that it can be resumed."""
        self._say(f"{self._name} makes no progress: it is killed and resumed")
        if self._driver.status is None:
            self._was_helped = True
            self._driver.kill()

    # Faults.

    def _get_ready(self) -> bool:
        """Wait until every role is there and the run makes progress, resuming it if need be; False when it ended."""
        began = time.monotonic()
        while not self._is_done:
            self._look()
            if self._driver.status is not None:
                if self._is_done or self._num_vain >= _MAX_VAIN_DRIVES:
                    return False
                self._resume()
                began = time.monotonic()
            has_moved = self._progress_at_s > max(began, self._driver.began_s)
            if has_moved and self._family.has_working({role: self._plan.sizes.get(role, 1) for role in _ROLES}):
                return True
            if self._is_stuck_since(max(began, self._progress_at_s)):
                self._help()
            time.sleep(_POLL_S)
        return False

    def _one(self, faults: deque[Fault]) -> None:
        """Wait for the next fault's moment and carry it out; it stays where it is when the run ends before."""
        fault = faults[0]
        until = time.monotonic() + fault.delay_s
        while time.monotonic() < until and not self._has_ended():
            time.sleep(_POLL_S)
        try:
            strike = self._strike(fault)
        except NotPossibleError as error:
            if not self._has_ended():
                faults.popleft()
                self._say(f"fault {fault.number}, {fault}: skipped, {error}")
            return
        if strike is not None:
            self._look()
            faults.popleft()
            self._say(f"fault {fault.number}, {fault}: {strike.victim}, in round {self._rounds_done} of {self._name}")
            self._recover(fault, strike)

    def _strike(self, fault: Fault) -> Strike | None:
        """Carry a fault out at its moment; None when the run ends before. Raises NotPossibleError."""
        if self._has_ended():
            return None
        strike = Strike(fault, self._scene, self._driver)
        every, patience_s = self._plan.checkpoint_every_rounds, self._plan.patience_s
        if not wait_for(fault.moment, self._run_dir, every, lambda: self._driver.status is not None, patience_s):
            return None
        strike.carry_out()
        return strike

    def _has_ended(self) -> bool:
        self._look()
        return self._is_done or self._driver.status is not None

    def _recover(self, fault: Fault, strike: Strike) -> None:
        round_index, num_drives = self._rounds_done, len(self._drives)
        back_at_s: float | None = None
        outcome = FaultOutcome.WENT_ON
        while True:
            self._look()
            is_over, now = strike.is_over, time.monotonic()
            if self._driver.status is not None and not self._is_done:
                if self._num_vain >= _MAX_VAIN_DRIVES:
                    outcome = FaultOutcome.STUCK
                    break
                self._resume()
                continue
            if is_over and back_at_s is None and strike.is_back(self._driver):
                back_at_s = now
            if self._is_done or (back_at_s is not None and self._progress_at_s > max(back_at_s, self._driver.began_s)):
                outcome = FaultOutcome.RESUMED if len(self._drives) > num_drives else FaultOutcome.WENT_ON
                break
            waits_since = max(strike.over_at_s or now, self._driver.began_s)
            if back_at_s is not None:
                waits_since = max(waits_since, self._progress_at_s)
            if self._is_stuck_since(waits_since):
                outcome = FaultOutcome.STUCK
                break
            time.sleep(_POLL_S)
        strike.end()
        assert strike.over_at_s is not None, "it has ended"
        back_after_s = None if outcome is FaultOutcome.STUCK else max(0.0, time.monotonic() - strike.over_at_s)
        self._blows.append(
            Blow(
                fault=fault,
                victim=strike.victim,
                round=round_index,
                at_s=strike.at_s,
                over_at_s=strike.over_at_s,
                back_after_s=back_after_s,
                outcome=outcome,
            )
        )
        after = "" if back_after_s is None else f" after {back_after_s:.1f} s"
        self._say(f"fault {fault.number}, {fault}: {outcome}{after}")
        if outcome is FaultOutcome.STUCK:
            self._help()

    def _finish(self) -> None:
        """Let the run end, resuming it as often as that helps."""
        while True:
            self._look()
            if self._driver.status is not None:
                self._clean_up()
                if self._is_done or self._num_vain >= _MAX_VAIN_DRIVES:
                    return
                self._num_vain += 1
                self._start()
            if self._is_stuck_since(self._progress_at_s):
                self._help()
            time.sleep(_POLL_S)


def undisturbed(name: str, directory: Path, plan: ChaosPlan) -> Sequence[Event]:
    """Run a recipe without faults; its events. Raises RuntimeError with its last words when it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    family = Family(secrets.token_hex(8))
    driver = Driver([*plan.command, f"name={name}", f"runs_dir={directory}"], environment | {MARK: family.mark})
    try:
        while driver.status is None:
            time.sleep(_POLL_S)
    finally:
        family.kill()
    driver.close()
    if driver.status:
        last = next((line.text for line in reversed(driver.lines) if line.text.strip()), "")
        raise RuntimeError(f"the undisturbed run ended with status {driver.status}: {last.strip()}")
    return read_events(directory / name)
