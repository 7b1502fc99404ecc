"""Execution of the table's commands in sequence, within a deadline."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from actors.run_log import read_events
from benchmarks.table.cells import Measured
from benchmarks.table.plan import Evaluation, Step, Training
from deploy.errors import RunFailedError
from deploy.machine import num_cpus, num_gpus
from deploy.offline.evaluation.evaluate import RESULTS

_D1 = (sys.executable, "-c", "from deploy.cli import main; main()")
_LOOK_EVERY_S = 1.0
# Remaining time below which no command is started: startup takes half a minute on a machine with a GPU.
_WORTH_STARTING_S = 40.0
# Grace period of a stopped run, which first writes a checkpoint.
_STOP_S = 120.0


class TimeIsUpError(Exception):
    """The deadline came before all steps were done."""


def execute(
    steps: Sequence[Step], out: Path, deadline: float, tell: Callable[[str], None], keep: Callable[[Measured], None]
) -> None:
    """Run the unfinished steps in order.

    Args:
        steps: the plan, or its remaining steps.
        out: folder of the commands' logs.
        deadline: when to stop, on the monotonic clock. The running command saves its progress.
        tell: receives a line about each command.
        keep: receives each cell as soon as it is measured.

    Raises:
        TimeIsUpError: the deadline has passed.
        RunFailedError: a command failed. The message has the reason and the path of its log.
        KeyboardInterrupt: on Ctrl-C, after the running command has saved its progress.
    """
    for number, step in enumerate(steps, start=1):
        if isinstance(step, Training) and step.is_done:
            continue
        if deadline - time.monotonic() < _WORTH_STARTING_S:
            raise TimeIsUpError
        tell(f"{number} of {len(steps)}: {step.name}")
        _run(step.name, command_of(step), out, deadline)
        if isinstance(step, Evaluation):
            keep(_measured(step, [one for one in steps if isinstance(one, Training)]))


def command_of(step: Step) -> tuple[str, ...]:
    """Build the arguments of `d1`. A run that has begun is resumed."""
    is_begun = isinstance(step, Training) and step.run_dir.is_dir()
    return (*step.words, "--resume") if is_begun else step.words


def _measured(step: Evaluation, trainings: Sequence[Training]) -> Measured:
    (cell,) = json.loads((step.out / RESULTS).read_text(encoding="utf-8"))["cells"]
    runs = [read_events(one.run_dir) for one in trainings if one.name in step.trained_by]
    return Measured(
        place=step.place,
        num_correct=cell["num_correct"],
        num_problems=cell["num_problems"],
        training_s=round(sum(events[-1]["time_s"] for events in runs), 1),
        evaluation_s=round(cell["worker_seconds"], 1),
        hardware=_hardware(),
        date=time.strftime("%Y-%m-%d"),
    )


@cache
def _hardware() -> str:
    if not num_gpus():
        return f"{num_cpus()} CPU cores"
    # In a child process: the query's CUDA context would hold half a gigabyte of GPU memory in this one.
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def _run(name: str, words: Sequence[str], out: Path, deadline: float) -> None:
    log = out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        # A new session: Ctrl-C reaches only this process, which stops the command exactly once.
        process = subprocess.Popen(
            [*_D1, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not _has_ended(process):
                if time.monotonic() > deadline:
                    raise TimeIsUpError
        except BaseException:
            _stop(process)
            raise
    if process.returncode:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = said[-1].removeprefix("d1: ") if said else f"it ended with status {process.returncode}"
        raise RunFailedError(f"{name} failed: {last}; its log is {log}; the same command continues from here")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LOOK_EVERY_S)
    return process.returncode is not None


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM, because children of a script's background process ignore SIGINT.
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
