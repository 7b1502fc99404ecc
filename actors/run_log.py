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

import asyncio
import errno
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from actors.files.atomic_file import replace_file
from actors.files.background_job import BackgroundJob
from actors.files.line_file import LineFile

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


# The newest events, which are kept in memory for followers. Older ones are read from the file.
_NUM_KEPT = 256
# Failures beyond this number of waiting events are counted only: they may come faster than a disk writes.
_MOST_WAITING = 10_000
# A write that takes longer is recorded, at most once in so many seconds: the disk is a bottleneck.
_SLOW_S, _SLOW_AGAIN_S = 3.0, 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Backlog:
    """What the run log has not written yet, and how writing went so far."""

    num_waiting: int
    """Events that wait for the disk."""
    num_failed: int
    """Attempts to write that failed."""
    writing_s: float
    """Seconds since the current write began; 0 if there is none."""
    slowest_s: float
    """Seconds of the slowest write."""


class RunLog:
    """Append-only log of one run directory, written by one background thread.

    Events are recorded in memory at once. `write_out` and `written` wait until they are on disk; what is recorded
    meanwhile shares the next write, so a slow disk delays only those who wait for it. On a full disk nothing is lost:
    what cannot be written is buffered in memory, in order, until there is room.
    """

    def __init__(
        self,
        directory: Path,
        wandb_project: str | None = None,
        *,
        is_going_on: bool = False,
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> None:
        """Open `directory` for appending; a resumed run continues the same files.

        With `wandb_project` the numbers also go to Weights & Biases, configured by WANDB_MODE and its other variables.
        With `is_going_on` the run was not interrupted, so the time since its last event counts. `on_event` receives
        every event in order, first those of the files. It is called on any thread, one call at a time.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._on_event = directory, on_event
        self._metrics = LineFile(directory / METRICS)
        self._samples = LineFile(directory / SAMPLES, is_synced=False)
        self._solve_rates = LineFile(directory / SOLVE_RATES)
        self._boards: list[Board] = [TensorBoard(directory / TENSORBOARD)]
        if wandb_project is not None:
            self._boards.append(WandB(directory, wandb_project))
        away_s = max(0.0, time.time() - (directory / METRICS).stat().st_mtime) if is_going_on else 0.0
        self._newest: deque[Event] = deque()
        self._num_events = 0
        self._paused_at_s: float | None = None
        for event in iterate_events(directory):
            self._note_event(event)
        # A monotonic clock: even if the system time changes, no event is earlier than the one before it.
        self._began = time.monotonic() - self._seconds_so_far() - away_s
        self._is_failing = False
        self._num_failed, self._num_uncounted = 0, 0
        self._slowest_s, self._slow_at = 0.0, -math.inf
        self._for_boards: list[tuple[str, Mapping[str, Any]]] = []
        self._files: dict[Path, str] = {}
        self._views: dict[str, Callable[[], None]] = {}
        self._keeping = threading.Lock()
        self._job = BackgroundJob(self._write, "run-log")

    def append(self, event: str, **values: Any) -> Event:
        """Record one event, and wait for it as `write_out` does."""
        record = self.add(event, **values)
        self.write_out()
        return record

    def note_failure(self, what: str, attempt: int = 1) -> None:
        """Record a failure that the run survives, and the number of the attempt; 0 if there is no other. Does not wait
        for the disk."""
        if self._metrics.num_waiting < _MOST_WAITING:
            self.add("failure", what=what, attempt=attempt)
        else:
            self._num_uncounted += 1
        self._job.request()

    def note_pause(self, why: str | None) -> None:
        """Record that work pauses because something does not answer, or (None) that it resumes. Does not wait for the
        disk.

        The pause may have begun before a restart of this process.
        """
        if why is not None:
            self.add("pause", what=why)
        elif self._paused_at_s is not None:
            self.add("pause_end", seconds=round(self.seconds() - self._paused_at_s, 3))
        self._job.request()

    def add(self, event: str, **values: Any) -> Event:
        """Record one event, buffered until the next write."""
        with self._keeping:
            line = json.dumps({"event": event, "time_s": self.seconds(), **values})
            record: Event = json.loads(line)
            self._metrics.add(line)
            self._note_event(record)
            self._for_boards.append((event, values))
        return record

    def add_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record readable completions, buffered until the next write. A round's come before its event."""
        for sample in samples:
            self._samples.add(json.dumps(dict(sample), ensure_ascii=False))

    def add_solve_rates(self, line: str) -> None:
        """Record how often the problems of a round were solved, buffered until the next write. A round's come before
        its event."""
        self._solve_rates.add(line)

    def replace(self, path: Path, text: str) -> None:
        """Replace a small file atomically with the next write, before the events. A newer text supersedes it."""
        with self._keeping:
            self._files[path] = text
        self._job.request()

    def show(self, name: str, write: Callable[[], None]) -> None:
        """Call `write` after the next write. A newer call of that name supersedes it; its OSErrors do not count."""
        with self._keeping:
            self._views[name] = write
        self._job.request()

    def write_out(self) -> None:
        """Wait until everything recorded so far is on disk, or buffered in memory because it cannot be written."""
        self._job.request().result()

    async def written(self) -> None:
        """Wait as `write_out` does, without blocking the event loop."""
        # Shielded: others wait for the same write.
        await asyncio.shield(asyncio.wrap_future(self._job.request()))

    def backlog(self) -> Backlog:
        """Return what is not written yet."""
        return Backlog(
            num_waiting=self._metrics.num_waiting,
            num_failed=self._num_failed,
            writing_s=round(self._job.running_s(), 1),
            slowest_s=round(self._slowest_s, 1),
        )

    def events_since(self, count: int) -> list[Event]:
        """Return the events after the first `count`, for a follower that has seen those.

        They are on disk, so that a follower has never seen more than a restarted process finds. While the disk is full,
        those that wait in memory are returned too.
        """
        with self._keeping:
            first = self._num_events - len(self._newest)
            num_shown = self._num_events - (0 if self._is_failing else self._metrics.num_waiting)
            kept = list(islice(self._newest, max(0, count - first), max(0, num_shown - first)))
        return kept if count >= first else [*islice(iterate_events(self._directory), count, first), *kept]

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return round(time.monotonic() - self._began, 3)

    def close(self) -> None:
        """Write everything that is buffered, and close the files and boards. Raises OSError if events are lost."""
        self._job.request()
        self._job.close()
        for board in self._boards:
            self._try(board.close)
        self._try(self._samples.close)
        self._try(self._solve_rates.close)
        self._metrics.close()

    def _note_event(self, event: Event) -> None:
        self._num_events += 1
        self._newest.append(event)
        # Those that wait are in no file yet.
        while len(self._newest) > max(_NUM_KEPT, self._metrics.num_waiting):
            self._newest.popleft()
        if event["event"] in ("pause", "pause_end"):
            self._paused_at_s = event["time_s"] if event["event"] == "pause" else None
        self._on_event(event)

    def _write(self) -> None:
        """Write what is buffered, on the background thread.

        Files that are replaced come first, a round's event after its samples and solve rates: if the process dies in
        between, all are written again. Lines that were added later wait for the next write.
        """
        began = time.monotonic()
        with self._keeping:
            # The events are counted first: what belongs to one was added before it.
            files = [(file, file.num_waiting) for file in (self._metrics, self._solve_rates, self._samples)]
            shown, self._for_boards = self._for_boards, []
            replaced, self._files = self._files, {}
            views, self._views = self._views, {}
        failed = [self._try(partial(self._replace, path, text)) for path, text in replaced.items()]
        (metrics, num_events), (rates, num_rates), (samples, num_samples) = files
        failed.append(self._try(partial(samples.write_out, num_samples)))
        failed.append(rates_failed := self._try(partial(rates.write_out, num_rates)))
        if rates_failed is None:
            failed.append(self._try(partial(metrics.write_out, num_events)))
        failed += [self._to_boards(event, values) for event, values in shown]
        for write in views.values():
            self._try(write)
        self._note_write([error for error in failed if error is not None], time.monotonic() - began)

    def _replace(self, path: Path, text: str) -> None:
        try:
            replace_file(path, text)
        except OSError:
            with self._keeping:
                self._files.setdefault(path, text)
            raise

    def _try(self, write: Callable[[], None]) -> OSError | None:
        try:
            write()
        except OSError as error:
            return error
        return None

    def _note_write(self, failed: Sequence[OSError], seconds: float) -> None:
        """Record failures of a write once, until everything can be written again, and that it was slow."""
        if failed and not self._is_failing:
            full = failed[0].errno == errno.ENOSPC
            what = "the disk is full" if full else f"the run directory: {failed[0]}"
            waiting = f"{self._metrics.num_waiting} events and {self._samples.num_waiting} samples wait in memory"
            self.add("failure", what=f"{what}: {waiting} until there is room", attempt=1)
        self._is_failing = bool(failed)
        self._num_failed += len(failed)
        self._slowest_s = max(self._slowest_s, seconds)
        if seconds > _SLOW_S and time.monotonic() - self._slow_at > _SLOW_AGAIN_S:
            self._slow_at = time.monotonic()
            what = f"the disk of the run directory is slow: a write took {seconds:.1f} s; the run goes on meanwhile"
            self.add("failure", what=what, attempt=0)
        if self._num_uncounted and not failed:
            more, self._num_uncounted = self._num_uncounted, 0
            what = f"{more} more failures were not recorded, as {_MOST_WAITING} events waited for the disk"
            self.add("failure", what=what, attempt=0)

    def _seconds_so_far(self) -> float:
        """Return how long the run has taken: since `began_at` if its last event is `run`, else up to its last event."""
        if not self._newest:
            return 0.0
        last = self._newest[-1]
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
    last_s = max((record["time_s"] for record in iterate_events(directory)), default=0.0)
    file = LineFile(path)
    file.add(json.dumps({"event": event, "time_s": round(last_s + silent_s, 3), **values}))
    file.close()


def is_done(events: Sequence[Event]) -> bool:
    """Return whether a run completed and nothing was added since."""
    return bool(events) and events[-1]["event"] == "done"


def read_events(directory: Path) -> list[Event]:
    """Return the events of a run directory, up to a line that a crash truncated."""
    return list(iterate_events(directory))


def iterate_events(directory: Path) -> Iterator[Event]:
    """Yield the events of a run directory, up to a line that a crash truncated, without holding all of them."""
    path = directory / METRICS
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                return
            yield event
