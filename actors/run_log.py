"""The run directory: what a run did, written as it happens.

`metrics.jsonl` is the truth: one JSON object a line, each with `event` and `time_s` (seconds since the run began).
Everything else that shows numbers (TensorBoard, W&B, the table, the curves) is made from these events.

| event | other fields |
|---|---|
| run | name, seed, commit, hardware, versions, began_at (unix time) |
| phase | phase: sft, rl, control; num_steps (optimizer steps or rounds, 0 where a time limits it: limit_s, spent_s) |
| sft_data | num_examples, num_held_out, num_overlong, mean_tokens, padding_share, packed_padding_share |
| sft | phase, step, loss, grad_norm, lr, tokens_per_s |
| sft_eval | phase, step, loss, loss_at_t |
| sft_samples | phase, step, samples: prompt and completion of each |
| round | round, policy_version, reward, correct, loss, ...: all of them are in docs/run_directory.md |
| evaluation | label: untrained or start, sft, round, rl, control; policy_version, round, num_correct, |
|       | num_problems, num_ungraded, items_right, num_items; without_room: problems that could not be asked |
| checkpoint | path (below the run directory), phase, round, policy_version, seconds; step in the midst of a stage |
| phase_end | phase, seconds (evaluation and checkpoints not counted), num_steps |
| failure | what, attempt (0: nothing was tried again) |
| pause | what: who does not answer; pause_end: seconds |
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
"""The label of the evaluations on validation problems. The others are on held-out ones."""
LEARNER_FAILED, RESTARTED = "a learner worker failed", "the learner group restarted"
"""What the `failure` events of one fault of the learner group begin with: each worker's, and the restart's."""


class RunLog:
    """Appends to the files of one run directory. A disk that is full costs nothing but time: what could not be written
    waits in memory, in order, and is written once there is room."""

    def __init__(self, directory: Path, wandb_project: str | None = None, *, is_going_on: bool = False) -> None:
        """Open `directory` for appending: a resumed run goes on in the same files.

        With `wandb_project` the numbers also go to Weights & Biases, as WANDB_MODE and its other variables say. With
        `is_going_on` the run has not been interrupted: the time since its last event counts.
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
        # A clock that nobody sets: an event is never earlier than the one before it.
        self._began = time.monotonic() - self._seconds_so_far() - away_s
        self._is_failing = False
        self._for_boards: list[tuple[str, Mapping[str, Any]]] = []
        # A thread that writes may find that it cannot, and say so.
        self._writing, self._keeping = threading.Lock(), threading.Lock()

    def append(self, event: str, **values: Any) -> Event:
        """Record one event; it is on disk when this returns, or waits in memory for room on the disk."""
        record = self.add(event, **values)
        self.write_out()
        return record

    def add(self, event: str, **values: Any) -> Event:
        """Record one event, which waits in memory for `write_out`."""
        return self._keep(event, values)

    def add_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record readable completions, which wait for `write_out`."""
        for sample in samples:
            self._samples.add(json.dumps(dict(sample), ensure_ascii=False))

    def add_solve_rates(self, line: str) -> None:
        """Record how often the problems of a round were solved; it waits for `write_out`."""
        self._solve_rates.add(line)

    def write_out(self) -> None:
        """Write what waits, and have the event of a round behind what it is about: a process that dies between the two
        does both again. Any thread may."""
        with self._writing:
            writes = self._samples.write_out, self._solve_rates.write_out, self._metrics.write_out
            with self._keeping:
                shown, self._for_boards = self._for_boards, []
            tries = (*map(self._try, writes), *(self._to_boards(event, values) for event, values in shown))
            self._note(next((failed for failed in tries if failed is not None), None))

    def events_since(self, count: int) -> list[Event]:
        """The events after the first `count`: what a follower has not seen."""
        return self._events[count:]

    def seconds(self) -> float:
        """Seconds since the run began."""
        return round(time.monotonic() - self._began, 3)

    def close(self) -> None:
        """Write what waits, and close the files and the boards. Raises OSError when events are lost by that."""
        for board in self._boards:
            self._try(board.close)
        self._try(self._samples.close)
        self._try(self._solve_rates.close)
        self._metrics.close()

    def _keep(self, event: str, values: Mapping[str, Any]) -> Event:
        """Followers see it at once; the file has it once it is written out."""
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
        """Say once that something cannot be written, until all of it can be again."""
        if failed is not None and not self._is_failing:
            what = "the disk is full" if failed.errno == errno.ENOSPC else f"the run directory: {failed}"
            waiting = f"{self._metrics.num_waiting} events and {self._samples.num_waiting} samples wait in memory"
            self._keep("failure", {"what": f"{what}: {waiting} until there is room", "attempt": 1})
        self._is_failing = failed is not None

    def _seconds_so_far(self) -> float:
        """Of a run that has only been announced, the time since; of a resumed one, the time it had run."""
        if not self._events:
            return 0.0
        last = self._events[-1]
        return max(0.0, time.time() - last["began_at"]) if last["event"] == "run" else last["time_s"]

    def _to_boards(self, event: str, values: Mapping[str, Any]) -> OSError | None:
        """Show the numbers of an event; the boards' last failure."""
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
    """A file of lines. A line is in it whole and once, or it waits in memory behind those before it."""

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        """Open for appending, without a last line that a crash cut short: what is appended to it could not be read.

        With `is_synced`, what was written out is on disk.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._is_synced = is_synced
        self._waiting: list[bytes] = []
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.ftruncate(self._file, whole.rfind(b"\n") + 1)

    @property
    def num_waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._waiting)

    def add(self, line: str) -> None:
        """Take a line, without a newline in it, to be written out."""
        self._waiting.append(line.encode(errors="backslashreplace") + b"\n")

    def write_out(self) -> None:
        """Write what waits, without a buffer between. Raises OSError; the file then has whole lines only."""
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
        """Write what waits, and close. Raises OSError when that cannot be written."""
        try:
            self.write_out()
        finally:
            # Another file may have its number from now on, and what comes late must not be written there.
            file, self._file = self._file, -1
            os.close(file)


def _write_all(file: int, data: bytes) -> None:
    """A full disk takes the beginning first."""
    while data:
        data = data[os.write(file, data) :]


class Board(Protocol):
    """Somewhere else that shows the numbers."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Show numbers of a step or a round."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the scalars, and write them out. Raises OSError; the next ones then go into a file of their own."""
        # Not torch's SummaryWriter: whoever records need not hold torch.
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            # After a failure it writes no more, and its file may end in half a record.
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
    """Weights & Biases. Needs the extra `d1[wandb]`."""

    def __init__(self, directory: Path, project: str) -> None:
        import wandb

        # One id for all of a run's processes: a resumed run goes on in the same place.
        self._run = wandb.init(project=project, name=directory.name, id=directory.name, dir=directory, resume="allow")

    def log(self, scalars: Mapping[str, float], step: int) -> None:  # noqa: ARG002 - it is among the scalars
        """Log the scalars. Stages count their steps apart, so W&B's own step, which only rises, is left to itself."""
        self._run.log(dict(scalars))

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def append_event(directory: Path, event: str, **values: Any) -> None:
    """Append an event to the log of a run whose coordinator is gone. Raises OSError."""
    path = directory / METRICS
    silent_s = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else 0.0
    last_s = max((record["time_s"] for record in read_events(directory)), default=0.0)
    file = LineFile(path)
    file.add(json.dumps({"event": event, "time_s": round(last_s + silent_s, 3), **values}))
    file.close()


def began_at(events: Sequence[Event]) -> float | None:
    """When a run began (unix time), which tells it from others of its name; None where no event says so."""
    return next((event.get("began_at") for event in events if event["event"] == "run"), None)


def is_done(events: Sequence[Event]) -> bool:
    """Whether a run came to its end and nothing was added since."""
    return bool(events) and events[-1]["event"] == "done"


def read_events(directory: Path) -> list[Event]:
    """The events of a run directory; a last line that a crash cut short is left out."""
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
