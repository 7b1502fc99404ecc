"""The machines made of namespaces that other tests use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import is_running
from tests.ray_processes import ROOT, wait_until
from tests.simulated.machines import environment_on_machines, machines

pytestmark = pytest.mark.nightly

_GET = "import sys, urllib.request as u; print(len(u.urlopen(sys.argv[1], timeout=1).read()))"
_KILLED = """
import time
from tests.simulated.machines import machines
with machines("alone") as (machine,):
    print(machine.pid, flush=True)
    time.sleep(100)
"""


def test_machines_have_their_own_hostnames_memory_and_links(tmp_path: Path) -> None:
    environment = environment_on_machines(tmp_path)
    with machines("one", "two") as (one, two), (tmp_path / "log").open("wb") as log:
        look = ["sh", "-c", "getent hosts $(hostname); echo x >/dev/shm/mine"]
        assert one.run(look, environment, 20).split() == ["127.0.1.1", "one"]
        assert two.run(["ls", "/dev/shm"], environment, 20) == ""
        server = two.start([sys.executable, "-um", "http.server", "-d", str(tmp_path), "8000"], environment, log)
        wait_until(lambda: b"Serving" in (tmp_path / "log").read_bytes(), "the server", 30)
        (tmp_path / "file").write_bytes(bytes(100_000))
        get = [sys.executable, "-c", _GET, f"http://{two.address}:8000/file"]
        before = two.sent_bytes()
        assert one.run(get, environment, 20) == "100000\n"
        assert 100_000 < two.sent_bytes() - before < 120_000
        two.stop()
        assert server.poll() is not None
        with pytest.raises(AssertionError, match="timed out"):
            one.run(get, environment, 20)


def test_no_process_of_a_machine_outlives_a_test_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _KILLED], cwd=ROOT, stdout=subprocess.PIPE) as test:
        assert test.stdout is not None
        init = int(test.stdout.readline())
        os.kill(test.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(init), "the machine's processes to end", 20)
