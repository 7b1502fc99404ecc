"""Two machines made of namespaces with a Ray cluster. One of them can be lost and replaced, or cut off for a time."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.processes.child_process import ChildProcess
from benchmarks.processes.run_processes import MARK, RunProcesses
from tests.ray_processes import BIN
from tests.simulated.machines import (
    HEALTH_CHECKS,
    RAY_PORT,
    Machine,
    Switch,
    environment_on_machines,
    machines,
    start_registry,
)

# Each machine has room for a whole run of recipes/chaos.yaml.
_NUM_CPUS = 2
_PLACEMENT = ("placement.learner=SPREAD", "placement.samplers=SPREAD")
_START_TIMEOUT_S = 120.0
_RESTART_S = 1.0


class MachineProcess(ChildProcess):
    """A command on a machine."""

    def __init__(self, machine: Machine, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command."""
        super().__init__(machine.entered(command), environment)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command. `nsenter`, its parent, stops, continues and ends with it."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                child.send_signal(number)
        if number is signal.SIGCONT:
            super().signal(number)


class MachinePair:
    """A head, where `d1 train` runs, and another machine. Ray is restarted wherever it ends, as by a supervisor."""

    def __init__(self, processes: RunProcesses) -> None:
        """Start both machines and the cluster. The caller must call `close`. Raises OSError if they do not start."""
        # Short: the paths of Ray's sockets are limited to 107 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="d1p-", dir="/tmp"))
        self._processes, self._is_closed = processes, threading.Event()
        self._supervisors: list[threading.Thread] = []
        self._log = (self._directory / "ray.log").open("ab")
        self._switch = Switch()
        try:
            self._head = self._switch.add("head")
            address = f"{self._head.address}:{RAY_PORT}"
            self._environment = environment_on_machines(self._directory) | HEALTH_CHECKS | {MARK: processes.mark}
            url = start_registry(self._head, self._environment, self._directory, self._log)
            self.environment = self._environment | {"D1_REDIS_URL": url, "RAY_ADDRESS": address}
            """Environment of `d1 train`."""
            self._ray_command = [str(BIN / "ray"), "start", "--block", f"--num-cpus={_NUM_CPUS}"]
            self._ray_command += ["--object-store-memory=100000000", "--disable-usage-stats"]
            self._supervise(self._head, ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"])
            self._wait_for_head(address)
            self._other = self._added(address)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def is_possible() -> bool:
        """Whether this machine makes namespaces."""
        try:
            with machines("probe"):
                return True
        except pytest.skip.Exception:
            return False

    def start(self, command: Sequence[str]) -> MachineProcess:
        """Start `d1 train ...` on the head, with learner workers and samplers on both machines."""
        return MachineProcess(self._head, [*command, *_PLACEMENT], self.environment)

    def lose(self) -> str:
        """Cut off and kill the other machine; returns its address."""
        self._other.stop()
        return self._other.address

    def replace(self) -> None:
        """Let a new machine join in place of the lost one."""
        self._other = self._added(self.environment["RAY_ADDRESS"])

    def cut_link(self) -> str:
        """Cut the other machine's link; returns its address."""
        self._other.cut_link()
        return self._other.address

    def mend_link(self) -> None:
        """Connect the other machine again."""
        self._other.mend_link()

    def close(self) -> None:
        """Stop both machines and delete their files."""
        self._is_closed.set()
        self._processes.kill()
        self._switch.close()
        for supervisor in self._supervisors:
            supervisor.join(_START_TIMEOUT_S)
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _added(self, address: str) -> Machine:
        machine = self._switch.add("other")
        self._supervise(machine, [f"--address={address}"])
        return machine

    def _supervise(self, machine: Machine, arguments: Sequence[str]) -> None:
        """Keep Ray running on a machine: it ends where the rest of the cluster counts the machine as lost."""

        def run() -> None:
            while not self._is_closed.is_set() and machine.is_running:
                machine.start([*self._ray_command, *arguments], self._environment, self._log).wait()
                self._is_closed.wait(_RESTART_S)

        self._supervisors.append(threading.Thread(target=run, name=f"d1-ray-on-{machine.name}", daemon=True))
        self._supervisors[-1].start()

    def _wait_for_head(self, address: str) -> None:
        words = [str(BIN / "ray"), "health-check", f"--address={address}"]
        for _ in range(int(_START_TIMEOUT_S)):
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self._head.run(words, self._environment, 20)
                return
            self._is_closed.wait(1.0)
        said = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise OSError(f"Ray's head did not start within {_START_TIMEOUT_S:.0f} s: {said}")
