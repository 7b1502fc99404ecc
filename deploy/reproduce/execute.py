"""Carries a plan out: one command of d1 after another, each as a user would give it; what is done is not done again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.run_log import is_done, read_events
from actors.whole_file import write_whole
from deploy.errors import RunFailedError, UserError
from deploy.evaluation.evaluate import RESULTS
from deploy.recipe.overrides import resolved_yaml
from deploy.reproduce.plan import Evaluation, Step, Texts, Training
from deploy.reproduce.texts import unlabelled

_D1 = (sys.executable, "-c", "from deploy.cli import main; main()")
_TELL_EVERY_S = 5.0
# A run that is told to stop writes a checkpoint first.
_STOP_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far it is."""

    step: Step
    place: int
    """Of the step among all, from 1."""
    num_steps: int
    doing: str
    """What the step is at."""


def execute(
    steps: Sequence[Step], out: Path, on_progress: Callable[[Progress], None], on_evaluated: Callable[[], object]
) -> None:
    """Do what is not done yet, in order; `on_evaluated` follows each evaluation, for the table grows by it.

    Raises:
        UserError: a task has no text to pre-train on, or too few problems.
        RunFailedError: a command failed; the sentence says why and where its log is.
        KeyboardInterrupt: after the command under way has kept what it has.
    """
    for place, step in enumerate(steps, start=1):

        def told(doing: str, step: Step = step, place: int = place) -> None:
            on_progress(Progress(step=step, place=place, num_steps=len(steps), doing=doing))

        if is_complete(step, out):
            continue
        told("starting")
        if isinstance(step, Texts):
            _write_texts(step)
        else:
            _run(step, out, told)
        if isinstance(step, Evaluation):
            on_evaluated()


def is_complete(step: Step, out: Path) -> bool:
    """Whether a step has left what it is to leave."""
    match step:
        case Texts():
            return step.path.is_file()
        case Training():
            return is_done(read_events(step.recipe.run_dir))
        case Evaluation():
            return (out / "evaluations" / step.name / RESULTS).is_file()


def command_of(step: Training | Evaluation, out: Path) -> tuple[str, ...]:
    """What follows `d1`."""
    if isinstance(step, Evaluation):
        return step.words
    name, *rest = step.words
    recipe = str(out / "recipes" / f"{step.name}.yaml")
    return (name, recipe, *rest, *(["--resume"] if step.recipe.run_dir.is_dir() else []))


def _write_texts(step: Texts) -> None:
    recipe = step.recipe
    try:
        texts = unlabelled(recipe.task, recipe.num_train_problems, step.count, recipe.seed)
    except ValueError as error:
        raise UserError(f"{step.name}: {error}") from error
    step.path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in texts]
    write_whole(step.path, "".join(lines))


def _run(step: Training | Evaluation, out: Path, told: Callable[[str], None]) -> None:
    log = out / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(step, Training):
        recipe = out / "recipes" / f"{step.name}.yaml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        write_whole(recipe, resolved_yaml(step.recipe))
    with log.open("ab") as file:
        # A session of its own: Ctrl-C comes to us, and we tell it once.
        process = subprocess.Popen(  # noqa: S603 - d1 itself, with words of its own plan
            [*_D1, *command_of(step, out)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not _has_ended(process):
                told(_doing(step))
        except BaseException:
            _stop(process)
            raise
    if process.returncode:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = said[-1].removeprefix("d1: ") if said else f"it ended with status {process.returncode}"
        raise RunFailedError(f"{step.name} failed: {last}; its log is {log}; the same command goes on from here")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait a while, for what is said meanwhile reads a whole run log."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TELL_EVERY_S)
    return process.returncode is not None


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Not SIGINT: where a script began us in the background all that we start ignores it.
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _doing(step: Training | Evaluation) -> str:
    """In a few words, from the run's log."""
    if isinstance(step, Evaluation):
        return f"evaluating {step.row} at {step.length} slots"
    events = read_events(step.recipe.run_dir)
    newest = next((event for event in reversed(events) if event["event"] in ("sft", "round", "evaluation")), None)
    match newest:
        case {"event": "sft", "step": done}:
            return f"SFT, step {done} of {step.recipe.sft.num_steps}"
        case {"event": "round", "round": done}:
            return f"round {done + 1} of {step.recipe.learner.num_rounds}"
        case {"event": "evaluation"}:
            return "evaluating"
        case _:
            return "starting"
