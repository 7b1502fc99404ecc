"""Run lock: one process writes a run directory, and its holder can be identified."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deploy.runs.lock
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.listing import read_run
from deploy.runs.lock import RunLock, holder_of
from deploy.runs.run_directory import create_run_dir, make_spec

Events = list[dict[str, Any]]
ROOT = Path(__file__).parents[3]
HOLD = """
import sys
from pathlib import Path
from deploy.runs.lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Start a process that holds the lock of a directory. Returns once it does."""
    started: list[subprocess.Popen[str]] = []

    def start(directory: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLD, str(directory)]
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_and_told_the_holder(tmp_path: Path, hold: Callable) -> None:
    first = hold(tmp_path)
    with pytest.raises(UserError) as refused:
        RunLock.take(tmp_path)
    sentence = str(refused.value)
    assert sentence.startswith(f"process {first.pid} on {socket.gethostname()} writes the run in {tmp_path} since 20")
    assert sentence.endswith(f"wait until it has ended, or stop it: kill {first.pid}")


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path, hold: Callable) -> None:
    first = hold(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert holder_of(tmp_path) is None
    RunLock.take(tmp_path).close()


def test_probing_for_the_holder_does_not_block_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunLock.take(tmp_path).close()
    looking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        os.close(looking)

    monkeypatch.setattr(deploy.runs.lock.time, "sleep", wait)
    RunLock.take(tmp_path).close()
    assert len(waits) == 1


def test_a_file_system_without_locks_is_reported_and_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(deploy.runs.lock.fcntl, "flock", flock)
    lock = RunLock.take(tmp_path)
    assert not lock.is_exclusive
    lock.close()
    assert holder_of(tmp_path) is None


def test_a_new_run_is_locked_from_the_moment_it_is_there(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, [])
    lock = create_run_dir(recipe, make_spec(recipe, Stages.ALL), None)
    holder = holder_of(recipe.run_dir)
    assert holder is not None
    assert (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
    lock.close()
    assert holder_of(recipe.run_dir) is None


def test_two_that_begin_the_same_run_do_not_write_over_each_other(recipe_file: Path, hold: Callable) -> None:
    recipe = load_recipe(recipe_file, [])
    spec = make_spec(recipe, Stages.ALL)
    partial = recipe.run_dir.with_name(".tiny.partial")
    partial.mkdir(parents=True)
    first = hold(partial)
    with pytest.raises(UserError, match=f"process {first.pid} on "):
        create_run_dir(recipe, spec, None)
    assert partial.is_dir(), "what the first writes is left alone"
    first.kill()
    first.wait()
    (partial / "torn").write_text("of the one that was killed")
    create_run_dir(recipe, spec, None).close()
    assert not (recipe.run_dir / "torn").exists()
    with pytest.raises(UserError, match="there already is a run tiny in "):
        create_run_dir(recipe, spec, None)
    assert [path.name for path in recipe.run_dir.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_running_run_cannot_be_resumed(command: str, recipe_file: Path, d1: Callable, hold: Callable) -> None:
    recipe = load_recipe(recipe_file, [])
    create_run_dir(recipe, make_spec(recipe, Stages.ALL), None).close()
    before = {path: path.stat().st_mtime_ns for path in recipe.run_dir.rglob("*") if path.name != ".lock"}
    first = hold(recipe.run_dir)
    d1(command, "tiny.yaml", "--resume").assert_refused(f"process {first.pid} on ", "writes the run in ")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_whose_lock_is_held_here_is_running_and_of_another_it_is_guessed(
    make_run: Callable, events: Events, hold: Callable, d1: Callable
) -> None:
    directory = make_run("tiny", events[:20])
    os.utime(directory / "metrics.jsonl", (0, 0))
    assert read_run(directory).state == "stopped?"
    hold(directory)
    assert read_run(directory).state == "running"
    assert " running " in d1("runs", "ls").out
    elsewhere = {"host": "another", "pid": 1, "began_at": 0.0}
    (directory / ".lock").write_text(json.dumps(elsewhere))
    assert read_run(directory).state == "stopped?"
