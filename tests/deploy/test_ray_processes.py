"""The helpers of tests that start Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ray

from deploy.orphans import descendants
from tests.processes import is_running
from tests.ray_processes import shut_down_ray, wait_until


def test_workers_that_outlive_their_raylet_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sh")
    with subprocess.Popen([raylet, "-c", "sleep 1000 & wait"]) as process:
        wait_until(lambda: len(descendants(process.pid)) == 1, "a worker", 30)
        (worker,) = descendants(process.pid)
        monkeypatch.setattr(ray, "shutdown", process.kill)
        shut_down_ray()
    wait_until(lambda: not is_running(worker), "the worker to end", 30)
