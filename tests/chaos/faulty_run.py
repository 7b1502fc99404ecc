"""A run with faults: `d1 train` as a user starts it, faults one after another, and `--resume` where it ended."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from actors.run_log import read_events
from benchmarks.processes.child_process import ChildProcess
from benchmarks.processes.run_processes import MARK, Role, RunProcesses
from tests.chaos.clock import MovableClock
from tests.chaos.faults import Fault, FaultOutcome, Platform
from tests.chaos.injection import EventTail, Injection, NotPossibleError, Surroundings, wait_for
from tests.chaos.platforms import Cluster, SmallDisk
from tests.chaos.record import InjectedFault, Launch, RunRecord, read_history
from tests.simulated.machine_pair import MachinePair

Log = Callable[[str], None]
_PROGRESS = {"sft", "sft_eval", "round", "evaluation", "checkpoint", "phase_end", "done"}
_POLL_S = 0.1
_MAX_LAUNCHES_WITHOUT_PROGRESS = 3
# Until the first step; `d1 train` gives up earlier by itself.
_START_TIMEOUT_S = 600.0
_ROLES = (Role.SAMPLER, Role.GRADER, Role.LEARNER, Role.COORDINATOR, Role.STORE, Role.CONTROLLER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosPlan:
    """Settings of all runs of a session."""

    command: tuple[str, ...]
    """`d1 train RECIPE KEY=VALUE ...`, without name and directory."""
    sizes: Mapping[Role, int]
    """Number of processes of roles with several."""
    checkpoint_every_rounds: int
    """Rounds between checkpoints."""
    progress_timeout_s: float
    """Seconds without progress after which a run counts as stuck."""
    leftover_timeout_s: float
    """Seconds that processes may take to end after `d1 train`."""
    disk_bytes: int
    """Size of the file system of a run directory."""


class FaultyRun:
    """A run, its `d1 train` and its faults."""

    def __init__(self, name: str, platform: Platform, directory: Path, plan: ChaosPlan, log: Log) -> None:
        """Prepare a run that is kept in `directory/name`, with its output beside it."""
        self._name, self._platform, self._plan, self._log = name, platform, plan, log
        self._kept, self._processes = directory / name, RunProcesses(secrets.token_hex(8))
        self._directory = directory / f".{name}"
        self._run_dir = self._directory / name
        self._launches: list[Launch] = []
        self._injected: list[InjectedFault] = []
        self._rounds_done = 0
        self._progress_at_s = 0.0
        self._is_done = False
        self._was_stuck = False
        self._num_without_progress = 0

    def run(self, faults: deque[Fault]) -> RunRecord:
        """Inject faults from the left, until there are none or the run is done. Then let the run end."""
        with ExitStack() as stack:
            self._surroundings, self._environment = self._set_up(stack)
            stack.callback(self._processes.kill)
            self._tail = EventTail(self._run_dir)
            self._start()
            while faults and self._wait_until_ready():
                self._inject_next(faults)
            self._finish()
            history = read_history(self._run_dir)
            self._keep()
        return RunRecord(
            name=self._name,
            platform=self._platform,
            launches=tuple(self._launches),
            injected=tuple(self._injected),
            history=history,
        )

    def _keep(self) -> None:
        """Copy the run out of its file system, and write its output."""
        if self._run_dir.is_dir():
            shutil.copytree(self._run_dir, self._kept)
        began_s = self._launches[0].began_s
        lines = (line for launch in self._launches for line in launch.lines)
        text = "".join(f"{line.at_s - began_s:8.2f}  {line.text}\n" for line in lines)
        self._kept.with_suffix(".log").write_text(text, encoding="utf-8")

    def _set_up(self, stack: ExitStack) -> tuple[Surroundings, dict[str, str]]:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment[MARK] = self._processes.mark
        disk = clock = cluster = machines = None
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        try:
            disk = SmallDisk(self._directory, self._plan.disk_bytes)
            stack.callback(disk.close)
        except OSError:
            self._directory.mkdir(parents=True, exist_ok=True)
        if self._platform is Platform.MOVABLE_CLOCK:
            clock = MovableClock(self._kept.with_suffix(".clock"))
            environment |= clock.environment
        if self._platform is Platform.CLUSTER:
            cluster = Cluster(self._processes)
            stack.callback(cluster.close)
            environment |= cluster.environment
        if self._platform is Platform.TWO_MACHINES:
            # After the disk, so that both machines see it.
            machines = MachinePair(self._processes)
            stack.callback(machines.close)
        surroundings = Surroundings(
            processes=self._processes,
            run_dir=self._run_dir,
            sizes=self._plan.sizes,
            disk=disk,
            clock=clock,
            cluster=cluster,
            machines=machines,
        )
        return surroundings, environment

    def _start(self) -> None:
        words = [*self._plan.command, f"name={self._name}", f"runs_dir={self._directory}"]
        words += ["--resume-or-start"] if self._launches else []
        machines = self._surroundings.machines
        self._driver = ChildProcess(words, self._environment) if machines is None else machines.start(words)
        self._progress_at_s = self._driver.began_s

    def _read_events(self) -> None:
        """Update the state of the run from its new events."""
        for event in self._tail.new():
            if event["event"] in _PROGRESS:
                self._progress_at_s, self._num_without_progress = time.monotonic(), 0
            if event["event"] == "round":
                self._rounds_done = event["round"] + 1
            self._is_done |= event["event"] == "done"

    def _end_launch(self) -> None:
        """Record how `d1 train` ended, and kill its remaining processes."""
        driver = self._driver
        assert driver.status is not None, "it has ended"
        assert driver.ended_s is not None, "reading the status records the time"
        for process in self._processes.living():
            process.signal(signal.SIGCONT)
        leftovers: list[str] = []
        if self._surroundings.cluster is None and self._surroundings.machines is None:
            deadline = time.monotonic() + self._plan.leftover_timeout_s
            while (left := self._processes.living()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            leftovers = [process.title[:80] for process in left]
            self._processes.kill()
        driver.close()
        self._launches.append(
            Launch(
                began_s=driver.began_s,
                ended_s=driver.ended_s,
                status=driver.status,
                was_stuck=self._was_stuck,
                lines=driver.lines,
                leftovers=tuple(leftovers),
            )
        )
        self._was_stuck = False
        self._read_events()

    def _resume(self) -> None:
        self._end_launch()
        self._num_without_progress += 1
        self._start()

    def _has_given_up(self) -> bool:
        return self._num_without_progress >= _MAX_LAUNCHES_WITHOUT_PROGRESS

    def _has_timed_out(self, since_s: float) -> bool:
        """Whether the run has made no progress for too long since a given time."""
        is_starting = self._progress_at_s <= self._driver.began_s
        limit_s = max(self._plan.progress_timeout_s, _START_TIMEOUT_S if is_starting else 0.0)
        return time.monotonic() - since_s > limit_s

    def _kill_stuck(self) -> None:
        """Kill a stuck `d1 train`, so that the run can be resumed."""
        self._log(f"{self._name} makes no progress and is killed")
        if self._driver.status is None:
            self._was_stuck = True
            self._driver.kill()

    def _has_ended(self) -> bool:
        self._read_events()
        return self._is_done or self._driver.status is not None

    def _wait_until_ready(self) -> bool:
        """Wait until all roles are complete and the run progresses, resuming it if needed. False when it has ended."""
        began = time.monotonic()
        while not self._is_done:
            self._read_events()
            if self._driver.status is not None:
                if self._is_done or self._has_given_up():
                    return False
                self._resume()
                began = time.monotonic()
            has_progressed = self._progress_at_s > max(began, self._driver.began_s)
            sizes = {role: self._plan.sizes.get(role, 1) for role in _ROLES}
            if has_progressed and self._processes.are_complete(sizes):
                return True
            if self._has_timed_out(max(began, self._progress_at_s)):
                self._kill_stuck()
            time.sleep(_POLL_S)
        return False

    def _inject_next(self, faults: deque[Fault]) -> None:
        """Inject the next fault at its trigger. The fault stays in the queue if the run ends first."""
        fault = faults[0]
        until = time.monotonic() + fault.delay_s
        while time.monotonic() < until and not self._has_ended():
            time.sleep(_POLL_S)
        if self._has_ended():
            return
        every, timeout_s = self._plan.checkpoint_every_rounds, self._plan.progress_timeout_s
        try:
            injection = Injection(fault, self._surroundings, self._driver)
            if not wait_for(fault.trigger, self._run_dir, every, lambda: self._driver.status is not None, timeout_s):
                return
            injection.inject()
        except NotPossibleError as error:
            if not self._has_ended():
                faults.popleft()
                self._log(f"fault {fault.number}, {fault}: skipped, {error}")
            return
        self._read_events()
        faults.popleft()
        self._log(f"fault {fault.number}, {fault}: {injection.victim}, in round {self._rounds_done} of {self._name}")
        self._recover(fault, injection)

    def _recover(self, fault: Fault, injection: Injection) -> None:
        """Wait for the outcome of a fault, and record it."""
        round_index = self._rounds_done
        outcome = self._outcome_of(injection)
        injection.end()
        assert injection.ended_s is not None, "it has ended"
        recovery_s = None if outcome is FaultOutcome.STUCK else max(0.0, time.monotonic() - injection.ended_s)
        self._injected.append(
            InjectedFault(
                fault=fault,
                victim=injection.victim,
                round=round_index,
                began_s=injection.began_s,
                ended_s=injection.ended_s,
                recovery_s=recovery_s,
                outcome=outcome,
            )
        )
        after = "" if recovery_s is None else f" after {recovery_s:.1f} s"
        self._log(f"fault {fault.number}, {fault}: {outcome}{after}")
        if outcome is FaultOutcome.STUCK:
            self._kill_stuck()

    def _outcome_of(self, injection: Injection) -> FaultOutcome:
        """Wait until the target has recovered and the run has then progressed, or until the timeout."""
        num_launches = len(self._launches)
        recovered_at_s: float | None = None
        while True:
            self._read_events()
            has_ended, now = injection.has_ended(), time.monotonic()
            if self._driver.status is not None and not self._is_done:
                if self._has_given_up():
                    return FaultOutcome.STUCK
                self._resume()
                continue
            if has_ended and recovered_at_s is None and injection.has_recovered(self._driver):
                recovered_at_s = now
            has_progressed = recovered_at_s is not None and self._progress_at_s > max(
                recovered_at_s, self._driver.began_s
            )
            if self._is_done or has_progressed:
                return FaultOutcome.RESUMED if len(self._launches) > num_launches else FaultOutcome.CONTINUED
            since_s = max(injection.ended_s or now, self._driver.began_s)
            if recovered_at_s is not None:
                since_s = max(since_s, self._progress_at_s)
            if self._has_timed_out(since_s):
                return FaultOutcome.STUCK
            time.sleep(_POLL_S)

    def _finish(self) -> None:
        """Let the run end, resuming it if needed."""
        while True:
            self._read_events()
            if self._driver.status is not None:
                self._end_launch()
                if self._is_done or self._has_given_up():
                    return
                self._num_without_progress += 1
                self._start()
            if self._has_timed_out(self._progress_at_s):
                self._kill_stuck()
            time.sleep(_POLL_S)


def run_reference(name: str, directory: Path, plan: ChaosPlan) -> float:
    """Run the recipe without faults; returns its seconds. Raises RuntimeError with its last line if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    processes = RunProcesses(secrets.token_hex(8))
    words = [*plan.command, f"name={name}", f"runs_dir={directory}"]
    child = ChildProcess(words, environment | {MARK: processes.mark})
    try:
        while child.status is None:
            time.sleep(_POLL_S)
    finally:
        processes.kill()
    child.close()
    if child.status:
        last = next((line.text for line in reversed(child.lines) if line.text.strip()), "")
        raise RuntimeError(f"the reference run ended with status {child.status}: {last.strip()}")
    seconds: float = read_events(directory / name)[-1]["time_s"]
    return seconds
