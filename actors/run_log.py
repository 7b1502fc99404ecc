"""The run directory: what a run did, written as it happens.

`metrics.jsonl` is the truth: one JSON object a line, each with `event` and `time_s` (seconds since the run began).
Everything else that shows numbers (TensorBoard, W&B, the table, the curves) is made from these events.

| event | other fields |
|---|---|
| run | name, seed, commit, hardware, versions, began_at (unix time) |
| phase | phase: sft, rl, control; num_steps (optimizer steps or rounds, 0 where a time limits it) |
| sft_data | num_examples, num_held_out, num_overlong, mean_tokens, padding_share, packed_padding_share |
| sft | phase, step, loss, grad_norm, lr, tokens_per_s |
| sft_eval | phase, step, loss, loss_at_t |
| round | round, policy_version, reward, correct, loss, ...: all of them are in docs/run_directory.md |
| evaluation | label: untrained or start, sft, round, rl, control; policy_version, round, num_correct, |
|       | num_problems, num_ungraded, items_right, num_items |
| checkpoint | path (below the run directory), phase, round, policy_version |
| phase_end | phase, seconds (evaluation and checkpoints not counted), num_steps |
| failure | what, attempt |
| pause | what: who does not answer; pause_end: seconds |
| done | seconds |
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

Event = dict[str, Any]

METRICS, SAMPLES, TENSORBOARD, CHECKPOINTS, RECIPE, FAILED_BATCHES = (
    "metrics.jsonl",
    "samples.jsonl",
    "tensorboard",
    "checkpoints",
    "recipe.yaml",
    "failed_batches",
)


class RunLog:
    """Appends to the files of one run directory."""

    def __init__(self, directory: Path, wandb_project: str | None = None) -> None:
        """Open `directory` for appending: a resumed run goes on in the same files.

        With `wandb_project` the numbers also go to Weights & Biases, as WANDB_MODE and its other variables say.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_at_line_end(directory / METRICS)
        self._samples = _open_at_line_end(directory / SAMPLES)
        self._boards: list[Board] = [TensorBoard(directory / TENSORBOARD)]
        if wandb_project is not None:
            self._boards.append(WandB(directory, wandb_project))
        self._events = read_events(directory)
        self._began = time.time() - self._seconds_so_far()

    def append(self, event: str, **values: Any) -> Event:
        """Record one event; it is on disk when this returns."""
        line = json.dumps({"event": event, "time_s": self.seconds(), **values})
        record: Event = json.loads(line)
        self._metrics.write(line + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        self._events.append(record)
        self._to_boards(event, values)
        return record

    def append_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record readable completions."""
        for sample in samples:
            self._samples.write(json.dumps(dict(sample), ensure_ascii=False) + "\n")
        self._samples.flush()

    def events_since(self, count: int) -> list[Event]:
        """The events after the first `count`: what a follower has not seen."""
        return self._events[count:]

    def seconds(self) -> float:
        """Seconds since the run began."""
        return round(time.time() - self._began, 3)

    def close(self) -> None:
        """Flush and close the files and the boards."""
        for board in self._boards:
            board.close()
        self._metrics.close()
        self._samples.close()

    def _seconds_so_far(self) -> float:
        """Of a run that has only been announced, the time since; of a resumed one, the time it had run."""
        if not self._events:
            return 0.0
        last = self._events[-1]
        return time.time() - last["began_at"] if last["event"] == "run" else last["time_s"]

    def _to_boards(self, event: str, values: Mapping[str, Any]) -> None:
        step = values.get("round", values.get("step"))
        if event not in ("sft", "sft_eval", "round", "evaluation") or step is None:
            return
        prefix = values.get("phase", values.get("label", event)) + ("_eval" if event == "sft_eval" else "")
        scalars = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        if event == "round":
            scalars |= {f"reward/{part}": value for part, value in values.get("reward_parts", {}).items()}
            scalars |= {f"reward_costs/{what}": count for what, count in values.get("reward_costs", {}).items()}
            scalars |= {f"num_ungraded/{outcome}": count for outcome, count in values.get("num_ungraded", {}).items()}
            for pool, use in values.get("pools", {}).items():
                scalars |= {f"pools/{pool}/{name}": value for name, value in use.items()}
        for board in self._boards:
            board.log(scalars, step)


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
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(directory))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the scalars, and write them out."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
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


def _open_at_line_end(path: Path) -> TextIO:
    """Open for appending, without a last line that a crash cut short: what is appended to it could not be read."""
    if path.is_file():
        whole = path.read_bytes()
        os.truncate(path, whole.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def began_at(events: Sequence[Event]) -> float | None:
    """When a run began (unix time), which tells it from others of its name; None where no event says so."""
    return next((event.get("began_at") for event in events if event["event"] == "run"), None)


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
