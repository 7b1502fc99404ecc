"""Watchdog of a run: however its driver ends, how to resume is printed and no process is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.run_log import append_event, read_events
from tests.processes import is_running

_DRIVER = """
import os, signal, subprocess, sys
from pathlib import Path
from deploy.job.watchdog import watchdog

how, run_dir = sys.argv[1], Path(sys.argv[2])
with watchdog(run_dir, "steady"):
    # The leaf is one that has written over its environment.
    script = "env -i sleep 1000 >/dev/null 2>&1 & echo $!; wait"
    child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    print(child.stdout.readline(), flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "ended by native code":
        os._exit(1)
    if how == "failed":
        sys.exit("a sentence of its own")
"""


def _drive(how: str, run_dir: Path) -> tuple[int, int, str]:
    """Return exit status, pid of the process that it started, and stderr up to its last writer's end."""
    words = [sys.executable, "-c", _DRIVER, how, str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, int(done.stdout), done.stderr


@pytest.mark.parametrize(("how", "expected"), [("killed", -9), ("ended by native code", 1)])
def test_a_driver_that_dies_abruptly_leaves_a_message_and_no_process(how: str, expected: int, tmp_path: Path) -> None:
    append_event(tmp_path, "round", round=0)
    status, child, errors = _drive(how, tmp_path)
    assert status == expected
    assert errors == (
        "d1: the run failed: its driver was killed, or ended by native code; "
        f"Ray's output is in {tmp_path}/driver.log; --resume goes on from the newest checkpoint\n"
    )
    assert read_events(tmp_path)[-1]["what"] == "its driver was killed, or ended by native code"
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "what it started is still there"
        time.sleep(0.02)


def test_a_service_of_a_finished_run_is_not_told_to_resume(tmp_path: Path) -> None:
    append_event(tmp_path, "done", seconds=1.0)
    _, _, errors = _drive("killed", tmp_path)
    assert "the run had finished" in errors
    assert "serve steady serves it again" in errors
    assert "--resume" not in errors
    assert [event["event"] for event in read_events(tmp_path)] == ["done"]


@pytest.mark.parametrize(("how", "expected"), [("failed", "a sentence of its own\n"), ("done", "")])
def test_the_watchdog_is_silent_after_a_normal_end(how: str, expected: str, tmp_path: Path) -> None:
    append_event(tmp_path, "round", round=0)
    _, child, errors = _drive(how, tmp_path)
    assert errors == expected
    assert len(read_events(tmp_path)) == 1
    assert is_running(child), "what it started is its own business"
    subprocess.run(["kill", "-9", str(child)], check=True)
