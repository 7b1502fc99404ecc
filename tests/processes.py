"""Processes in tests: whether one is running, and d1 within a line of bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def is_running(pid: int) -> bool:
    """Return whether a process has not ended. A zombie, not yet reaped by its parent, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def d1_in_bash(form: str, *words: str, unbuffered: str = "", cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `"$@"` is a d1 command."""
    return subprocess.run(
        ["bash", "-c", form, "bash", sys.executable, "-c", "from deploy.cli import main; main()", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
