"""History of a run: its events, aggregated for tables and plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.run_log import LEARNER_FAILED, RESTARTED, VALIDATION, Event, is_done
from rewards.score import Score


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleScore:
    """Result of one evaluation at one schedule."""

    score: Score
    """Number of problems solved."""
    mean_steps: float
    """Mean denoise steps per completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation, on the held-out problems or (label `validation`) on the validation set."""

    label: str
    """The stage it follows: untrained, start, sft, round, rl or control. `validation` selects the best checkpoint."""
    round: int
    """Rounds trained before it."""
    policy_version: int
    """Version that was evaluated."""
    time_s: float
    """Seconds since the run began."""
    drawn_s: float
    """Position on the time axis of a curve, in seconds. It equals `time_s`, except for the control.

    The control is placed at the start of RL plus its own training time."""
    score: Score
    """Number of problems solved, at the first schedule."""
    schedules: Mapping[str, ScheduleScore] = field(default_factory=dict)
    """The result at every evaluated schedule, by name."""


@dataclass(kw_only=True, slots=True)
class RunHistory:
    """Aggregated events of a run. What a resumed run repeats counts once, with its latest values."""

    name: str = ""
    """The run's name."""
    rounds: dict[int, Event] = field(default_factory=dict)
    """The `round` events by round, ascending."""
    steps: dict[str, list[Event]] = field(default_factory=dict)
    """The `sft` events of the phases `sft` and `control`, in order."""
    sft_losses: dict[str, list[Event]] = field(default_factory=dict)
    """The `sft_eval` events of the phases `sft` and `control`, in order."""
    planned: dict[str, int] = field(default_factory=dict)
    """Optimizer steps or rounds planned for a phase; 0 if a time limit ends it."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """In order."""
    newest_evaluated: int = -1
    """The largest `round` of the evaluations between rounds; -1 without any."""
    phase_ends: dict[str, Event] = field(default_factory=dict)
    """The `phase_end` events by phase."""
    phase_begins: dict[str, float] = field(default_factory=dict)
    """When each phase first began, in seconds since the run began."""
    checkpoints: dict[str, Event] = field(default_factory=dict)
    """The `checkpoint` events by path."""
    num_failures: int = 0
    """Failures that the run survived. A dead learner counts once, with its workers' errors and its restart."""
    is_learner_down: bool = False
    """Whether the learner group's newest failure is counted, and neither its restart nor a new phase has followed."""
    seconds: float = 0.0
    """Duration of the run so far."""
    last: Event | None = None
    """The newest event."""

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event["event"]:
            case "run":
                self.name = event["name"]
            case "phase":
                _begin_phase(self, event)
            case "sft":
                self.steps.setdefault(event["phase"], []).append(event)
            case "sft_eval":
                self.sft_losses.setdefault(event["phase"], []).append(event)
            case "round":
                _add_round(self, event)
            case "evaluation":
                _add_evaluation(self, _evaluation(event, _drawn_s(self, event)))
            case "phase_end":
                self.phase_ends[event["phase"]] = event
            case "checkpoint":
                self.checkpoints[event["path"]] = event
            case "failure":
                _add_failure(self, event)
        self.seconds, self.last = float(event["time_s"]), event

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished and no event has followed."""
        return self.last is not None and is_done([self.last])

    @property
    def heldout(self) -> list[Evaluation]:
        """The held-out evaluations of the trained policy, without those of the control."""
        return [item for item in self.evaluations if item.label not in ("control", VALIDATION)]

    @property
    def validation(self) -> list[Evaluation]:
        """The evaluations on the validation set."""
        return [item for item in self.evaluations if item.label == VALIDATION]

    @property
    def accuracy_curve(self) -> list[Evaluation]:
        """Evaluations of the accuracy curve: on the validation set, or without one on the held-out problems."""
        return self.validation or self.heldout

    @property
    def round_numbers(self) -> list[float]:
        """The rounds, counted from 1."""
        return [index + 1.0 for index in self.rounds]

    def series(self, key: str) -> list[float]:
        """Return a metric of every round, in order; NaN if a round lacks it (not every algorithm has a ratio or KL)."""
        return [float(event.get(key, math.nan)) for event in self.rounds.values()]

    def final(self, label: str) -> Evaluation | None:
        """Return the newest evaluation with a label."""
        return next((item for item in reversed(self.evaluations) if item.label == label), None)


def read_history(events: Iterable[Event]) -> RunHistory:
    """Build a history from events."""
    history = RunHistory()
    for event in events:
        history.add(event)
    return history


def _add_failure(history: RunHistory, event: Event) -> None:
    """Count a failure, but not its consequences that are logged as failures too, nor one that needed no retry."""
    what = str(event["what"])
    is_restart = what.startswith(RESTARTED)
    is_learner = is_restart or what.startswith(LEARNER_FAILED)
    if event.get("attempt") != 0 and not (is_learner and history.is_learner_down):
        history.num_failures += 1
    if is_learner:
        history.is_learner_down = not is_restart


def _begin_phase(history: RunHistory, event: Event) -> None:
    """Start a phase: discard what it recorded before, except the steps up to the one from which a run resumes it."""
    phase, step, planned = event["phase"], event.get("from_step", 0), event["num_steps"]
    history.planned[phase] = planned
    history.phase_begins.setdefault(phase, event["time_s"])
    history.is_learner_down = False
    for kept in (history.steps, history.sft_losses):
        before = [event for event in kept.pop(phase, []) if step and event["step"] <= step]
        if before:
            kept[phase] = before


def _add_round(history: RunHistory, event: Event) -> None:
    """Add a round and discard later ones: a resumed run repeats the rounds after its checkpoint."""
    index = event["round"]
    if next(reversed(history.rounds), -1) >= index:
        history.rounds = {done: kept for done, kept in history.rounds.items() if done < index}
    # Only after a restart: a look at all evaluations in every round would take quadratic time.
    if history.newest_evaluated > index:
        kept = [item for item in history.evaluations if not _is_of_rounds(item) or item.round <= index]
        history.evaluations = kept
        history.newest_evaluated = max((item.round for item in kept if _is_of_rounds(item)), default=-1)
    history.rounds[index] = event


def _add_evaluation(history: RunHistory, evaluation: Evaluation) -> None:
    history.evaluations.append(evaluation)
    if _is_of_rounds(evaluation):
        history.newest_evaluated = max(history.newest_evaluated, evaluation.round)


def _is_of_rounds(evaluation: Evaluation) -> bool:
    return evaluation.label in ("round", VALIDATION)


def _drawn_s(history: RunHistory, event: Event) -> float:
    control, rl_s = history.phase_ends.get("control"), history.phase_begins.get("rl")
    if event["label"] != "control" or control is None or rl_s is None:
        return float(event["time_s"])
    return rl_s + float(control["seconds"])


def _evaluation(event: Event, drawn_s: float) -> Evaluation:
    schedules = {
        name: ScheduleScore(score=_score(scored), mean_steps=scored["mean_steps"])
        for name, scored in event.get("schedules", {}).items()
    }
    return Evaluation(
        label=event["label"],
        round=event["round"],
        policy_version=event["policy_version"],
        time_s=event["time_s"],
        drawn_s=drawn_s,
        score=_score(event),
        schedules=schedules,
    )


def _score(counts: Mapping[str, Any]) -> Score:
    return Score(num_correct=counts["num_correct"], num_problems=counts["num_problems"])
