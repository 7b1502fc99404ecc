"""Orphaned processes: all descendants of a process end with it."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.processes import is_running

SCRIPT = """
import subprocess, sys
from deploy.orphans import adopt_orphans, kill_descendants
if sys.argv[1] == "adopting":
    adopt_orphans()
leaves = "setsid sleep 1000 >/dev/null 2>&1 & echo $!; wait"
shell = subprocess.Popen(["sh", "-c", leaves], stdout=subprocess.PIPE, text=True)
print(shell.stdout.readline(), flush=True)
shell.kill()
shell.wait()
kill_descendants()
"""


def _orphan_of(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_an_adopted_orphan_is_killed() -> None:
    orphan = _orphan_of("adopting")
    deadline = time.monotonic() + 10
    while is_running(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_orphan_that_is_not_adopted_stays() -> None:
    orphan = _orphan_of("leaving")
    assert is_running(orphan)
    subprocess.run(["kill", "-9", str(orphan)], check=True)
