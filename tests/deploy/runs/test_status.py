"""`d1 status`: the state of a run from its directory alone, with a plain warning if that is old."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deploy.cli.status
from actors.coordination.reporting.status import ActorState, ActorStatus, RunStatus
from actors.coordination.reporting.timeline import Timeline, WorkSpan, write_trace
from deploy.runs.lock import RunLock

Events = list[dict[str, Any]]
ROOT = Path(__file__).parents[3]
WIDTH = 80


def _actor(name: str, seconds: float = 0.0, work_unit: str = "", state: ActorState = ActorState.IDLE) -> ActorStatus:
    return ActorStatus(name=name, state=state, work_unit=work_unit, seconds=seconds)


BUSY = [_actor(f"sampler {index}", 3.0 + index, f"work unit 12:{index}", ActorState.BUSY) for index in range(10)]
STATUS = RunStatus(
    at=0.0,
    stage="rl",
    round=12,
    num_rounds=400,
    policy_version=13,
    learner={"1": "round 12: training", "0": "round 12: training", "10": "round 12: waiting for completions"},
    work_units={"waiting": 3, "running": 10, "ready": 1, "failed": 0},
    pools=(*BUSY, _actor("sampler 10"), _actor("grader 0", 125.0, state=ActorState.UNREACHABLE)),
    waits=("sampler 9 silent for 20 s; work unit 12:9 waits for it",),
    max_staleness=1,
    staleness=0.5,
    num_restarts={"coordinator": 1, "learner": 0, "samplers": 2},
    seconds={"sampling": 2.5, "training": 1.2, "publish": 0.1},
)


@pytest.fixture
def run_dir(make_run: Callable[..., Path], events: Events, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in its rounds that reported just now, from a process on another machine."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    directory = make_run("tiny", [event for event in events[:20] if event["event"] != "checkpoint"])
    elsewhere = {"host": "another", "pid": 1, "began_at": 0.0}
    (directory / ".lock").write_text(json.dumps(elsewhere))
    replace(STATUS, at=_just_now()).write(directory)
    return directory


def _just_now() -> float:
    """Return a time in the future, which counts as now, so that a slow machine does not make it old."""
    return time.time() + 60


def _write_timeline(directory: Path) -> None:
    timeline = Timeline()
    now = time.monotonic()
    timeline.add_work_spans([WorkSpan(actor="sampler 0", key=None, began=now - 4, ended=now - 3, is_done=False)])
    timeline.add_round(11, {"sampling_s": 2.0, "training_s": 6.0, "publish_s": 2.0})
    write_trace(directory, timeline.spans())


def test_status_fits_into_80_columns(run_dir: Path, d1: Callable) -> None:
    _write_timeline(run_dir)
    ended = d1("status", "tiny")
    assert ended.status == 0
    lines = [line.rstrip() for line in ended.out.splitlines()]
    assert all(len(line) <= WIDTH for line in lines), ended.out
    assert lines[0].startswith("tiny: running; last update 0.0 s ago")
    expected = [
        "stage         RL, 12 of 400 rounds done; policy version 13",
        "learner       rank 0  round 12: training",
        "              rank 1  round 12: training",
        "              rank 10  round 12: waiting for completions",
        "samplers      10 busy, 1 idle, 0 unreachable",
        *(f"              sampler {index}  work unit 12:{index} for {3 + index} s" for index in (9, 8, 7)),
        *(f"              sampler {index}  work unit 12:{index} for {3 + index}.0 s" for index in (6, 5, 4, 3, 2)),
        "              and 2 more busy",
        "graders       0 busy, 0 idle, 1 unreachable",
        "              grader 0  unreachable for 2 min 05 s",
        "work units    3 waiting, 10 running, 1 ready, 0 failed",
        "staleness     0.5 versions in the newest round, 1 at most",
        "restarts      coordinator 1, samplers 2",
        "newest round  sampling 2.5 s (66 %), training 1.2 s (32 %), publish 0.1 s (3 %)",
        "idle          share of the time of the newest round:",
        "              learner rank 0 20 %, sampler 0 100 %",
        "waits         sampler 9 silent for 20 s; work unit 12:9 waits for it",
    ]
    assert lines[1 : len(expected) + 1] == expected


@pytest.mark.parametrize(
    ("stage", "said"),
    [("sft", "SFT, step 100 of 100; policy"), ("control", "control; policy"), ("untrained", "untrained; policy")],
)
def test_the_stage_is_shown_with_its_progress(run_dir: Path, d1: Callable, stage: str, said: str) -> None:
    replace(STATUS, at=_just_now(), stage=stage).write(run_dir)
    assert f"stage         {said}" in d1("status").out


def test_the_newest_failures_are_shown_harmless_and_short(run_dir: Path, d1: Callable) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for index in range(5):
            what = f"a sampler failed: no. {index}\x1b[2J [red]\nTraceback" + "x" * 5000
            file.write(json.dumps({"event": "failure", "time_s": 61.0 + index, "what": what, "attempt": 1}) + "\n")
    said = d1("status").out
    assert "5 failures survived; the newest entries of the run log:" in said
    assert "no. 1" not in said
    assert "at 1 min 05 s: a sampler failed: no. 4\\u001b[2J [red]" in said
    assert "Traceback" not in said


def test_a_silent_run_is_not_shown_as_running(run_dir: Path, d1: Callable) -> None:
    replace(STATUS, at=time.time() - 45).write(run_dir)
    said = d1("status").out
    assert re.match(r"tiny: stopped or unreachable: last update [45]\d s ago", said)
    assert "learner" not in said, "what it did then is not what it does"
    assert json.loads(d1("status", "--json").out)["is_running"] is False


def test_a_run_with_a_local_process_is_running_until_it_ends(run_dir: Path, d1: Callable) -> None:
    replace(STATUS, at=time.time() - 1).write(run_dir)
    lock = RunLock.take(run_dir)
    assert d1("status").out.startswith("tiny: starting (process "), "what was said before it began is not its own"
    replace(STATUS, at=_just_now()).write(run_dir)
    assert f"tiny: running (process {os.getpid()} since 20" in d1("status").out
    held = json.loads((run_dir / ".lock").read_text()) | {"began_at": time.time() - 300}
    (run_dir / ".lock").write_text(json.dumps(held))
    replace(STATUS, at=time.time() - 45).write(run_dir)
    said = d1("status").out
    assert re.search(r"silent: last update [45]\d s ago", " ".join(said.split()))
    assert "waits" in said
    lock.close()
    replace(STATUS, at=_just_now()).write(run_dir)
    said = d1("status").out
    assert said.startswith("tiny: stopped, last update 0.0 s ago")
    assert json.loads((run_dir / ".lock").read_text())["host"] == socket.gethostname()


def test_a_run_that_is_done_says_so(make_run: Callable, events: Events, d1: Callable) -> None:
    directory = make_run("tiny", events)
    replace(STATUS, at=_just_now()).write(directory)
    assert d1("status").out.startswith("tiny: finished, 0.0 s ago")
    lock = RunLock.take(directory)
    replace(STATUS, at=_just_now()).write(directory)
    assert d1("status").out.startswith("tiny: finished; its process still runs (process ")
    lock.close()


def test_a_run_without_status_is_shown_too(run_dir: Path, d1: Callable) -> None:
    (run_dir / "status.json").unlink()
    os.utime(run_dir / "metrics.jsonl", (_just_now(), _just_now()))
    assert d1("status").out.startswith("tiny: running; last update 0.0 s ago")
    assert json.loads(d1("status", "--json").out)["status"] is None


def test_json_has_the_whole_status(run_dir: Path, d1: Callable) -> None:
    _write_timeline(run_dir)
    said = json.loads(d1("status", str(run_dir), "--json").out)
    assert said["run"] == "tiny"
    assert said["directory"] == str(run_dir)
    assert said["is_running"] is True
    assert said["age_s"] == 0
    assert said["status"] == json.loads((run_dir / "status.json").read_text())
    assert said["status"]["pools"][0] == {
        "name": "sampler 0",
        "state": "busy",
        "work_unit": "work unit 12:0",
        "seconds": 3.0,
    }
    assert said["idle"] == {"learner rank 0": 0.2, "sampler 0": 1.0}


def test_without_a_name_it_is_the_run_with_the_newest_event(
    run_dir: Path, make_run: Callable, events: Events, d1: Callable
) -> None:
    older = make_run("older", events)
    os.utime(older / "metrics.jsonl", (1, 1))
    assert d1("status").out.startswith("tiny: ")
    os.utime(run_dir / "metrics.jsonl", (0, 0))
    assert d1("status").out.startswith("older: ")


def test_what_cannot_be_done_is_refused_in_a_sentence(run_dir: Path, d1: Callable) -> None:
    d1("status", "tini").assert_refused("there is no run tini in runs", "did you mean tiny?")
    d1("status", "--runs-dir", "nowhere").assert_refused("there is no run in nowhere")
    d1("status", "--watch").assert_refused("--watch is for a terminal", "--json")
    d1("status", "--watch", "--json").assert_refused("give one of them")


def test_watching_shows_it_again_until_ctrl_c(run_dir: Path, d1: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        replace(STATUS, at=_just_now(), round=77).write(run_dir)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(deploy.cli.status.time, "sleep", wait)
    ended = d1("status", "--watch")
    assert ended.status == 0
    assert waits == [2.0, 2.0]
    assert "RL, 77 of 400 rounds done" in ended.out


def test_status_imports_neither_torch_nor_ray(run_dir: Path) -> None:
    _write_timeline(run_dir)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['d1', 'status', 'tiny']; import atexit;"
        "atexit.register(lambda: print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules))));"
        "from deploy.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.endswith("[]\n"), ended.stdout
