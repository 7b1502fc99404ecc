"""Output routing: Ray's messages go to a file, Python's to the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
import os, sys
from pathlib import Path
from deploy.job.ray_output import redirect_native_output

screen = sys.stdout
with redirect_native_output(Path(sys.argv[1])):
    os.write(2, b"native code says\\n")
    print("a listener of Ray's says")
    screen.write("the display shows\\n")
    sys.stderr.write("python warns\\n")
    subprocess = os.system("echo a child says >&2")
os.write(2, b"native code says afterwards\\n")
print("the result")
raise ValueError("a bug")
"""


def test_native_output_goes_into_the_file_and_pythons_to_the_screen(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    log.write_text("of the run before\n")
    words = [sys.executable, "-c", CODE, str(log)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert log.read_text().splitlines() == [
        "of the run before",
        "native code says",
        "a listener of Ray's says",
        "a child says",
    ]
    assert done.stdout == "the display shows\nthe result\n"
    lines = done.stderr.splitlines()
    assert lines[:2] == ["python warns", "native code says afterwards"]
    assert lines[-1] == "ValueError: a bug"


def test_captured_output_is_still_captured(tmp_path: Path) -> None:
    from io import StringIO

    from deploy.job.ray_output import redirect_native_output

    before, sys.stderr = sys.stderr, StringIO()
    try:
        with redirect_native_output(tmp_path / "driver.log"):
            sys.stderr.write("said")
        assert sys.stderr.getvalue() == "said"
    finally:
        sys.stderr = before
