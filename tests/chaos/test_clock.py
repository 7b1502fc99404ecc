"""The movable clock: a jump shows in the wall clock of running processes, and not in the monotonic clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.clock import MovableClock

SCRIPT = """
import subprocess, sys, time
child = "import time; print(time.time(), time.monotonic())"
for _ in range(2):
    print(time.time(), time.monotonic(), flush=True)
    subprocess.run([sys.executable, "-c", child], check=True)
    sys.stdin.readline()
    time.sleep(0.01)
"""


def test_a_jump_reaches_a_process_and_its_children_and_no_other(tmp_path: Path) -> None:
    clock = MovableClock(tmp_path / "clock")
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for jump_s in (-7200.0, 0.0):
            for _ in range(2):
                wall, monotonic = map(float, process.stdout.readline().split())
                # Both were printed before the first jump, or after it.
                assert abs(wall - time.time() - (0.0 if jump_s else -7200.0)) < 60
                assert abs(monotonic - time.monotonic()) < 60
            clock.jump(jump_s)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
