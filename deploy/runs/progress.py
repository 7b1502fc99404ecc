"""Progress display of a run: a live bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from actors.run_log import LEARNER_FAILED, RESTARTED, VALIDATION, Event
from deploy.printing import counted, duration, metric, printable, rough_duration
from deploy.runs.result_tables import score_text
from deploy.runs.stages import STAGES
from deploy.wait_display import WaitDisplay, progress_bar
from rewards.score import Score

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_LINE_EVERY_S = 5.0
_LONGEST_FAILURE = 200
_LONGEST_PROMPT, _LONGEST_COMPLETION = 60, 160
# A step that takes this many times as long as the one before it is reported.
_UNUSUAL = 2.0
# Events that can arrive at any time, and do not end a wait.
_ASYNC_EVENTS = ("run", "status", "waits", "failure", "pause", "pause_end", "scale", "loaded")
_BETWEEN_PHASES = {
    "evaluation": "preparing the next stage",
    "sft_data": "preparing SFT",
    "pairs": "preparing the rounds",
    "phase_end": "writing a checkpoint",
    "checkpoint": "evaluating",
}


class ProgressDisplay:
    """Displays events as they arrive, from any thread. A context manager: leaving it releases the terminal."""

    def __init__(self, console: Console) -> None:
        """Show on `console`: a live display where it is a terminal, lines where it is not."""
        self._console = console
        self._bar = _PhaseBar(console)
        self._phase: Event | None = None
        self._last_line_s = float("-inf")
        self._last_step_s = 0.0
        self._validation_loss: float | None = None
        self._waiting = WaitDisplay(console, f"{'':10}  ")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the live display; what it showed stays on the screen. A second call does nothing."""
        self._waiting.end()
        self._bar.stop()

    def wait_for_end(self) -> None:
        """Report that only the run's processes are still to end, if that takes long, as on a busy machine."""
        self._waiting.begin("ending the run's processes")

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event["event"] == "waiting":
            self._show_wait(event)
            return
        if event["event"] not in _ASYNC_EVENTS and not event.get("beside"):
            self._waiting.end()
        match event["event"]:
            case "status" | "waits":
                self._print(f"{'':10}  {printable(event['what'])}")
                self._waiting.postpone()
            case "phase":
                self._begin(event)
            case "sft" | "round" if self._phase is not None:
                self._advance(event, self._phase)
                self._wait_for_step(event)
            case "sft_eval":
                self._validation_loss = event["loss"]
            case "phase_end":
                self._phase = None
        if event["event"] in _FORMATTERS:
            self._line(event, _FORMATTERS[event["event"]](event))
        if what := self._next(event):
            self._wait(what)

    def _show_wait(self, event: Event) -> None:
        """Show what the driver waits for: a new wait, or (`goes_on`) the next part of the current one."""
        if event.get("goes_on"):
            self._waiting.change(printable(event["what"]))
        else:
            self._wait(printable(event["what"]), at_once=True)

    def _wait_for_step(self, event: Event) -> None:
        """Report if the next step takes much longer than this one: a process may have died and be restarting."""
        usual_s, self._last_step_s = event["time_s"] - self._last_step_s, event["time_s"]
        what = f"round {event['round'] + 2}" if event["event"] == "round" else "the next step"
        self._waiting.begin(f"waiting for {what}", first_after_s=_UNUSUAL * usual_s)

    def _next(self, event: Event) -> str:
        """Name what the run does after an event, unless it is a step of a phase; the run log records only its end."""
        if event["event"] == "failure" and str(event["what"]).startswith((LEARNER_FAILED, RESTARTED)):
            self._phase = None
            return "restarting the learners"
        return _BETWEEN_PHASES.get(event["event"], "") if self._phase is None else ""

    def _wait(self, what: str, *, at_once: bool = False) -> None:
        self._bar.stop()
        self._waiting.begin(what, at_once=at_once)

    def _begin(self, event: Event) -> None:
        self._phase, self._last_step_s = event, event["time_s"]
        self._last_line_s, self._validation_loss = float("-inf"), None
        name, (total, unit) = STAGES[event["phase"]].name, self._total(event)
        self._line(event, f"{name}: {total:g} {unit}")
        self._bar.begin(name, total or None)

    def _total(self, phase: Event) -> tuple[float, str]:
        """Return the total work of a phase, and its unit."""
        if "limit_s" in phase:
            return max(1, round(phase["limit_s"])), "seconds"
        return phase["num_steps"], STAGES[phase["phase"]].unit

    def _advance(self, event: Event, phase: Event) -> None:
        total, unit = self._total(phase)
        done = event["round"] + 1 if event["event"] == "round" else event["step"]
        facts = _facts(event, self._validation_loss)
        if unit == "seconds":
            spent_s = phase["spent_s"] + event["time_s"] - phase["time_s"]
            done, facts = min(total, spent_s), f"step {done}  {facts}"
        self._bar.advance(done, facts)
        if not self._console.is_terminal and event["time_s"] - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = event["time_s"]
            left = _time_left(event, phase) if unit == "steps" else ""
            self._line(event, f"{STAGES[phase['phase']].name} {round(done)}/{total:g} {unit}  {facts}{left}")

    def _line(self, event: Event, text: str) -> None:
        self._print(f"{event['time_s']:8.1f} s  {text}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _PhaseBar:
    """Progress bar of the current phase, at the bottom of a terminal; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._progress = progress_bar(console)
        self._task: TaskID | None = None
        self._is_first = True

    def begin(self, name: str, total: float | None) -> None:
        self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, facts="")
        self._is_first = True

    def advance(self, done: float, facts: str) -> None:
        assert self._task is not None, "a phase has begun"
        self._progress.start()
        if self._is_first and done > 1:
            # A resumed run: steps done before must not count in the speed that predicts the remaining time.
            self._progress.reset(self._task, completed=int(done) - 1)
        self._is_first = False
        self._progress.update(self._task, completed=int(done), facts=facts)

    def stop(self) -> None:
        self._progress.stop()


def _examples(event: Event) -> str:
    """Describe the training data of SFT."""
    overlong = f", {event['num_overlong']} too long" if event["num_overlong"] else ""
    held_out = f", {event['num_held_out']} held out" if event["num_held_out"] else ""
    padding = f"{100 * event['padding_share']:.0f} % padding, {100 * event['packed_padding_share']:.0f} % if packed"
    return f"{event['num_examples']} examples of {event['mean_tokens']:.0f} tokens{held_out}{overlong}; {padding}"


def _pairs(event: Event) -> str:
    """Describe the stored preference pairs of the rounds."""
    overlong = f", {event['num_overlong']} with too long a prompt" if event["num_overlong"] else ""
    chosen, rejected = event["mean_chosen_tokens"], event["mean_rejected_tokens"]
    return f"{event['num_pairs']} pairs: {chosen:.0f} tokens chosen, {rejected:.0f} rejected{overlong}"


def _evaluation(event: Event) -> str:
    score = Score(num_correct=event["num_correct"], num_problems=event["num_problems"])
    at = f" at {event['schedule']}" if "schedule" in event else ""
    what = "validation" if event["label"] == VALIDATION else "held-out"
    return f"{what} accuracy {_place(event)}{at}: {score_text(score)}"


def _loaded(event: Event) -> str:
    """Describe the throughput of reading a checkpoint twice: for its checksums, and to load it."""
    gigabytes = event["num_bytes"] / 1e9
    checked, loaded = (f"in {event[key]:.1f} s, {gigabytes / event[key]:.1f} GB/s" for key in ("check_s", "load_s"))
    return f"{event['path']}: {gigabytes:.1f} GB checked {checked}; loaded {loaded}"


def _what(event: Event) -> str:
    return printable(str(event["what"]).partition("\n")[0])[:_LONGEST_FAILURE]


def _facts(event: Event, validation_loss: float | None) -> str:
    rate = f"{event['tokens_per_s']:.0f} tokens/s"
    if event["event"] == "sft":
        validation = "" if validation_loss is None else f"validation {metric(validation_loss)}  "
        return f"loss {metric(event['loss'])}  {validation}{rate}"
    if "reward" not in event:
        # Stored pairs; a round that was skipped has no metrics.
        return f"preferred {100 * event.get('preferred', 0):.0f} %  margin {metric(event.get('margin', 0))}  {rate}"
    divergence = f"divergence {metric(event['teacher_divergence'])}  " if "teacher_divergence" in event else ""
    return f"{divergence}reward {event['reward']:.3f}  correct {100 * event['correct']:.0f} %  {rate}"


def _time_left(event: Event, phase: Event) -> str:
    """Estimate the time of the remaining steps from the speed so far, evaluations and checkpoints included."""
    done, left = event["step"] - phase.get("from_step", 0), phase["num_steps"] - event["step"]
    if done <= 0 or left <= 0:
        return ""
    return f"  {rough_duration(left * (event['time_s'] - phase['time_s']) / done)} left"


def _samples(event: Event) -> str:
    """Format a line for each prompt and its completion."""
    lines = [f"completions after {event['step']} steps:"]
    for sample in event["samples"]:
        prompt, completion = _in_a_line(sample["prompt"]), _in_a_line(sample["completion"])
        # The question is at the end of a prompt.
        end = prompt if len(prompt) <= _LONGEST_PROMPT else f"...{prompt[-_LONGEST_PROMPT:]}"
        begin = completion if len(completion) <= _LONGEST_COMPLETION else f"{completion[:_LONGEST_COMPLETION]}..."
        lines.append(f"{'':12}{end} -> {begin or '(nothing)'}")
    return "\n".join(lines)


def _in_a_line(text: str) -> str:
    return " ".join(printable(text).split())


def _place(event: Event) -> str:
    if event["label"] not in ("round", VALIDATION):
        return STAGES[event["label"]].when
    return f"after round {event['round']}" if event["round"] else "before the rounds"


def _stopped_at(event: Event) -> str:
    """Describe the position of a stopped run."""
    if event["step"] is not None:
        return f"after {counted(event['step'], 'step')} of {STAGES[event['phase']].name}, saved in a checkpoint"
    return f"after {counted(event['round'], 'round')}, saved in a checkpoint" if event["round"] else "at the beginning"


_FORMATTERS: dict[str, Callable[[Event], str]] = {
    "sft_data": _examples,
    "pairs": _pairs,
    "sft_eval": lambda event: f"validation loss after {event['step']} steps: {metric(event['loss'])}",
    "sft_samples": _samples,
    "evaluation": _evaluation,
    "phase_end": lambda event: f"{STAGES[event['phase']].name} took {duration(event['seconds'])}",
    "stopped": lambda event: f"stopped {_stopped_at(event)}",
    "resume": lambda event: printable(event["what"]),
    "checkpoint": lambda event: f"checkpoint {event['path']}",
    "failure": lambda event: f"failure, attempt {event['attempt']}: {_what(event)}",
    "loaded": _loaded,
    "pause": lambda event: f"the run is paused until this recovers: {_what(event)}",
    "scale": lambda event: f"{event['pool']}: {event['before']} -> {event['after']}",
    "pause_end": lambda event: f"the run resumed after {duration(event['seconds'])}",
    "done": lambda event: f"done in {duration(event['seconds'])}",
}
"""Formatters of the events that print a line."""
