"""Run log: writes a run's events, samples and metrics into the run directory.

`metrics.jsonl` is the source of truth: one JSON object per line, with `event` and `time_s` (seconds since the start).
Everything else that shows numbers (TensorBoard, W&B, tables, curves) is derived from these events.

| event | other fields |
|---|---|
| run | name, seed, stages: all, sft, rl; commit, hardware, versions, began_at (unix time) |
| phase | phase: sft, rl, control; num_steps (optimizer steps or rounds, 0 where a time limits it: limit_s, spent_s) |
| sft_data | num_examples, num_held_out, num_overlong, mean_tokens, padding_share, packed_padding_share |
| sft | phase, step, loss, grad_norm, lr, tokens_per_s |
| sft_eval | phase, step, loss, loss_at_t |
| sft_samples | phase, step, samples: prompt and completion of each |
| round | round, policy_version, reward, correct, loss, ...: all of them are in docs/run_directory.md |
| evaluation | label: untrained or start, sft, round, rl, control, validation; policy_version, round, num_correct, |
|       | num_problems, num_ungraded, items_right, num_items; without_room: problems whose prompts left no room |
| checkpoint | path (below the run directory), phase, round, policy_version, seconds; step if within a stage |
| phase_end | phase, seconds (evaluation and checkpoints not counted), num_steps |
| failure | what, attempt (0: no retry) |
| pause | what: the service that does not answer; pause_end: seconds |
| scale | pool: samplers or graders; before, after |
| loaded | path, num_bytes, check_s, load_s: the learner has loaded a large checkpoint |
| done | seconds |
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

Event = dict[str, Any]

METRICS, SAMPLES, SOLVE_RATES, TENSORBOARD, CHECKPOINTS, RECIPE, FAILED_BATCHES, DRIVER_LOG = (
    "metrics.jsonl",
    "samples.jsonl",
    "solve_rates.jsonl",
    "tensorboard",
    "checkpoints",
    "recipe.yaml",
    "failed_batches",
    "driver.log",
)


VALIDATION = "validation"
"""Label of the evaluations on validation problems. The others are on held-out ones."""
LEARNER_FAILED, RESTARTED = "a learner worker failed", "the learner group restarted"
"""Prefixes of the `failure` events of a learner fault: the one of each failed worker, and that of the restart."""


class RunLog:
    """Append-only log of one run directory.

    On a full disk nothing is lost: what cannot be written is buffered in memory, in order, until there is room.
    """

    def __init__(self, directory: Path, wandb_project: str | None = None, *, is_going_on: bool = False) -> None:
        """Open `directory` for appending; a resumed run continues the same files.

        With `wandb_project` the numbers also go to Weights & Biases, configured by WANDB_MODE and its other variables.
        With `is_going_on` the run was not interrupted, so the time since its last event counts.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = LineFile(directory / METRICS)
        self._samples = LineFile(directory / SAMPLES, is_synced=False)
        self._solve_rates = LineFile(directory / SOLVE_RATES)
        self._boards: list[Board] = [TensorBoard(directory / TENSORBOARD)]
        if wandb_project is not None:
            self._boards.append(WandB(directory, wandb_project))
        away_s = max(0.0, time.time() - (directory / METRICS).stat().st_mtime) if is_going_on else 0.0
        self._events = read_events(directory)
        # A monotonic clock: even if the system time changes, no event is earlier than the one before it.
        self._began = time.monotonic() - self._seconds_so_far() - away_s
        self._is_failing = False
        self._for_boards: list[tuple[str, Mapping[str, Any]]] = []
        # Two locks: a thread that cannot write records that failure while it holds the first one.
        self._writing, self._keeping = threading.Lock(), threading.Lock()

    def append(self, event: str, **values: Any) -> Event:
        """Record one event. On return it is on disk, or buffered in memory if the disk is full."""
        record = self.add(event, **values)
        self.write_out()
        return record

    def note_failure(self, what: str, attempt: int = 1) -> None:
        """Record a failure that the run survives, and the number of the attempt; 0 if there is no other."""
        self.append("failure", what=what, attempt=attempt)

    def note_pause(self, why: str | None) -> None:
        """Record that work pauses because something does not answer, or (None) that it resumes.

        The pause may have begun before a restart of this process.
        """
        pauses = [event for event in self._events if event["event"] in ("pause", "pause_end")]
        if why is not None:
            self.append("pause", what=why)
        elif pauses and pauses[-1]["event"] == "pause":
            self.append("pause_end", seconds=round(self.seconds() - pauses[-1]["time_s"], 3))

    def add(self, event: str, **values: Any) -> Event:
        """Record one event, buffered until `write_out`."""
        return self._keep(event, values)

    def add_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record readable completions, buffered until `write_out`."""
        for sample in samples:
            self._samples.add(json.dumps(dict(sample), ensure_ascii=False))

    def add_solve_rates(self, line: str) -> None:
        """Record how often the problems of a round were solved, buffered until `write_out`."""
        self._solve_rates.add(line)

    def write_out(self) -> None:
        """Write everything that is buffered. Any thread may call it.

        A round's event is written after its samples and solve rates: if the process dies in between, all are written
        again.
        """
        with self._writing:
            writes = self._samples.write_out, self._solve_rates.write_out, self._metrics.write_out
            with self._keeping:
                shown, self._for_boards = self._for_boards, []
            tries = (*map(self._try, writes), *(self._to_boards(event, values) for event, values in shown))
            self._note(next((failed for failed in tries if failed is not None), None))

    def events_since(self, count: int) -> list[Event]:
        """Return the events after the first `count`, for a follower that has seen those."""
        return self._events[count:]

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return round(time.monotonic() - self._began, 3)

    def close(self) -> None:
        """Write everything that is buffered, and close the files and boards. Raises OSError if events are lost."""
        for board in self._boards:
            self._try(board.close)
        self._try(self._samples.close)
        self._try(self._solve_rates.close)
        self._metrics.close()

    def _keep(self, event: str, values: Mapping[str, Any]) -> Event:
        """Add an event: followers see it at once, the file has it after `write_out`."""
        with self._keeping:
            line = json.dumps({"event": event, "time_s": self.seconds(), **values})
            record: Event = json.loads(line)
            self._metrics.add(line)
            self._events.append(record)
            self._for_boards.append((event, values))
        return record

    def _try(self, write: Callable[[], None]) -> OSError | None:
        try:
            write()
        except OSError as error:
            return error
        return None

    def _note(self, failed: OSError | None) -> None:
        """Record a write failure once, until everything can be written again."""
        if failed is not None and not self._is_failing:
            what = "the disk is full" if failed.errno == errno.ENOSPC else f"the run directory: {failed}"
            waiting = f"{self._metrics.num_waiting} events and {self._samples.num_waiting} samples wait in memory"
            self._keep("failure", {"what": f"{what}: {waiting} until there is room", "attempt": 1})
        self._is_failing = failed is not None

    def _seconds_so_far(self) -> float:
        """Return how long the run has taken: since `began_at` if its last event is `run`, else up to its last event."""
        if not self._events:
            return 0.0
        last = self._events[-1]
        return max(0.0, time.time() - last["began_at"]) if last["event"] == "run" else last["time_s"]

    def _to_boards(self, event: str, values: Mapping[str, Any]) -> OSError | None:
        """Log the numbers of an event to the boards. Returns their first failure."""
        step = values.get("round", values.get("step"))
        if event not in ("sft", "sft_eval", "round", "evaluation") or step is None:
            return None
        prefix = values.get("phase", values.get("label", event)) + ("_eval" if event == "sft_eval" else "")
        scalars = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        if event == "round":
            scalars |= {f"reward/{part}": value for part, value in values.get("reward_parts", {}).items()}
            scalars |= {f"reward_costs/{what}": count for what, count in values.get("reward_costs", {}).items()}
            scalars |= {f"num_ungraded/{outcome}": count for outcome, count in values.get("num_ungraded", {}).items()}
            for pool, use in values.get("pools", {}).items():
                scalars |= {f"pools/{pool}/{name}": value for name, value in use.items()}
        failures = [self._try(partial(board.log, scalars, step)) for board in self._boards]
        return next((failure for failure in failures if failure is not None), None)


class LineFile:
    """Append-only file of lines. A line is in it once and whole, or buffered in memory, in order."""

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        """Open for appending, and cut off a last line that a crash truncated, which would corrupt the next one.

        With `is_synced`, written lines are on disk (fsync).
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._is_synced = is_synced
        self._waiting: list[bytes] = []
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.ftruncate(self._file, whole.rfind(b"\n") + 1)

    @property
    def num_waiting(self) -> int:
        """Number of buffered lines."""
        return len(self._waiting)

    def add(self, line: str) -> None:
        """Buffer a line, which must contain no newline."""
        self._waiting.append(line.encode(errors="backslashreplace") + b"\n")

    def write_out(self) -> None:
        """Write the buffered lines directly, without a stream buffer. Raises OSError; the file then has whole lines
        only."""
        while self._waiting:
            size = os.fstat(self._file).st_size
            try:
                _write_all(self._file, self._waiting[0])
                if self._is_synced:
                    os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, size)
                raise
            del self._waiting[0]

    def close(self) -> None:
        """Write the buffered lines, and close. Raises OSError if they cannot be written."""
        try:
            self.write_out()
        finally:
            # The OS may reuse the descriptor, and late writes must not reach another file.
            file, self._file = self._file, -1
            os.close(file)


def _write_all(file: int, data: bytes) -> None:
    """Write all of `data`: a nearly full disk may accept only its beginning."""
    while data:
        data = data[os.write(file, data) :]


class Board(Protocol):
    """Dashboard that also shows the numbers."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Show the scalars of a step or a round."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class TensorBoard:
    """Writer of TensorBoard event files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the scalars to disk. Raises OSError; later scalars then go into a new file."""
        # Not torch's SummaryWriter: the process that logs need not load torch.
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            # After a failure the writer stops, and its file may end in a partial record.
            self._writer = self._writer or EventFileWriter(str(self._directory))
            self._writer.add_event(Record(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Weights & Biases run. Needs the extra `d1[wandb]`."""

    def __init__(self, directory: Path, project: str) -> None:
        import wandb

        # One id for all of a run's processes, so that a resumed run continues the same W&B run.
        self._run = wandb.init(project=project, name=directory.name, id=directory.name, dir=directory, resume="allow")

    def log(self, scalars: Mapping[str, float], step: int) -> None:  # noqa: ARG002 - it is among the scalars
        """Log the scalars without a step: each stage counts its own steps, and W&B's step may only increase."""
        self._run.log(dict(scalars))

    def close(self) -> None:
        """Upload the remaining data."""
        self._run.finish()


def append_event(directory: Path, event: str, **values: Any) -> None:
    """Append an event to the log of a run whose coordinator is dead. Raises OSError."""
    path = directory / METRICS
    silent_s = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else 0.0
    last_s = max((record["time_s"] for record in read_events(directory)), default=0.0)
    file = LineFile(path)
    file.add(json.dumps({"event": event, "time_s": round(last_s + silent_s, 3), **values}))
    file.close()


def began_at(events: Sequence[Event]) -> float | None:
    """Return when a run began (unix time), which distinguishes runs of the same name; None if no event says so."""
    return next((event.get("began_at") for event in events if event["event"] == "run"), None)


def is_done(events: Sequence[Event]) -> bool:
    """Return whether a run completed and nothing was added since."""
    return bool(events) and events[-1]["event"] == "done"


def read_events(directory: Path) -> list[Event]:
    """Return the events of a run directory, up to a line that a crash truncated."""
    path = directory / METRICS
    if not path.is_file():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events
