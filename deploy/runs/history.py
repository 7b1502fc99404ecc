"""A run's events, put in order: what the table, the curves and `d1 runs` read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.run_log import LEARNER_FAILED, RESTARTED, VALIDATION, Event, is_done
from rollout.score import Score


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleScore:
    """One evaluation at one schedule."""

    score: Score
    """How many held-out problems it solved."""
    mean_steps: float
    """Denoise steps of a completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation on the held-out or, by its label, on the validation problems."""

    label: str
    """After what: untrained, start, sft, round, rl or control. Or validation: what a checkpoint is chosen by."""
    round: int
    """Rounds trained before it."""
    time_s: float
    """Seconds since the run began."""
    drawn_s: float
    """Where a curve has it, in seconds: there too, but of the control, which begins where RL began, by its training."""
    score: Score
    """How many it solved, at the first schedule."""
    schedules: Mapping[str, ScheduleScore] = field(default_factory=dict)
    """The same at every schedule that was asked for, by name."""

    @property
    def line(self) -> Literal["policy", "control", "validation"]:
        """The curve that it is a point of: `policy` are the held-out problems, solved by what the run is for."""
        if self.label == "control":
            return "control"
        return "validation" if self.label == VALIDATION else "policy"


@dataclass(kw_only=True, slots=True)
class RunHistory:
    """What a run has come to. What a resumed run repeated counts once, as it was the last time."""

    name: str = ""
    """The run's name."""
    began_at: float | None = None
    """When it began, in seconds since 1970."""
    phase: str | None = None
    """The phase begun last."""
    rounds: dict[int, Event] = field(default_factory=dict)
    """The `round` events by round, ascending."""
    steps: dict[str, list[Event]] = field(default_factory=dict)
    """The `sft` events of the phases `sft` and `control`, in order."""
    sft_losses: dict[str, list[Event]] = field(default_factory=dict)
    """The `sft_eval` events of the phases `sft` and `control`, in order."""
    planned: dict[str, int] = field(default_factory=dict)
    """Optimizer steps or rounds that a phase set out to do; 0 where a time limits it."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """In order."""
    phase_ends: dict[str, Event] = field(default_factory=dict)
    """The `phase_end` events by phase."""
    phase_begins: dict[str, float] = field(default_factory=dict)
    """When a phase was first begun, in seconds since the run began."""
    checkpoints: dict[str, Event] = field(default_factory=dict)
    """The `checkpoint` events by path."""
    num_failures: int = 0
    """Faults that the run survived: a learner that dies is one, with what its other workers say and its restart."""
    is_learner_down: bool = False
    """Whether the learner group's newest fault is counted and it has trained nothing since."""
    num_forgotten: int = 0
    """How often rounds, steps or evaluations were taken back, because a resumed run did them again."""
    seconds: float = 0.0
    """How long the run took, or has taken so far."""
    last: Event | None = None
    """The newest event."""

    def add(self, event: Event) -> None:
        """Take the next event.

        Raises:
            KeyError, TypeError: it lacks what events of its kind have; nothing of it is taken.
        """
        seconds = float(event["time_s"])
        _add(self, event)
        self.seconds, self.last = seconds, event

    @property
    def newest_round(self) -> Event | None:
        """The `round` event of the newest round."""
        return next(reversed(self.rounds.values()), None)

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end and nothing was added since."""
        return self.last is not None and is_done([self.last])

    @property
    def heldout(self) -> list[Evaluation]:
        """The held-out evaluations of the policy that the run is for: the control is another one."""
        return [item for item in self.evaluations if item.line == "policy"]

    @property
    def validation(self) -> list[Evaluation]:
        """Those on validation problems."""
        return [item for item in self.evaluations if item.line == "validation"]

    @property
    def course(self) -> list[Evaluation]:
        """How its accuracy went: on the validation problems, or in a run without any on the held-out ones."""
        return self.validation or self.heldout

    def series(self, key: str) -> list[float]:
        """A number of every round, in order; NaN where a round has none (not every algorithm has a ratio or a KL)."""
        return [float(event.get(key, math.nan)) for event in self.rounds.values()]

    def final(self, label: str) -> Evaluation | None:
        """The newest evaluation with a label."""
        return next((item for item in reversed(self.evaluations) if item.label == label), None)


def read_history(events: Iterable[Event]) -> RunHistory:
    """The history that events tell."""
    history = RunHistory()
    for event in events:
        history.add(event)
    return history


def _add(history: RunHistory, event: Event) -> None:
    match event["event"]:
        case "run":
            history.name = event["name"]
            history.began_at = history.began_at or event.get("began_at")
        case "phase":
            _begin_phase(history, event)
        case "sft":
            history.steps.setdefault(event["phase"], []).append(event)
        case "sft_eval":
            history.sft_losses.setdefault(event["phase"], []).append(event)
        case "round":
            _add_round(history, event)
        case "evaluation":
            history.evaluations.append(_evaluation(event, _drawn_s(history, event)))
        case "phase_end":
            history.phase_ends[event["phase"]] = event
        case "checkpoint":
            history.checkpoints[event["path"]] = event
        case "failure":
            _add_failure(history, event)


def _add_failure(history: RunHistory, event: Event) -> None:
    """A fault counts once, of all that its consequences are recorded as; what needed no other try is none."""
    what = str(event["what"])
    is_restart = what.startswith(RESTARTED)
    is_learner = is_restart or what.startswith(LEARNER_FAILED)
    if event.get("attempt") != 0 and not (is_learner and history.is_learner_down):
        history.num_failures += 1
    if is_learner:
        history.is_learner_down = not is_restart


def _begin_phase(history: RunHistory, event: Event) -> None:
    """What there was of it counts no more, but for the steps before that where a run that was stopped in it goes on."""
    phase, step, planned = event["phase"], event.get("from_step", 0), event["num_steps"]
    history.phase, history.planned[phase] = phase, planned
    history.phase_begins.setdefault(phase, event["time_s"])
    history.is_learner_down = False
    for kept in (history.steps, history.sft_losses):
        all_of_it = kept.pop(phase, [])
        before = [event for event in all_of_it if step and event["step"] <= step]
        history.num_forgotten += len(before) < len(all_of_it)
        if before:
            kept[phase] = before


def _add_round(history: RunHistory, event: Event) -> None:
    """A run that was resumed from a checkpoint goes through the rounds after it again."""
    if not isinstance(index := event["round"], int):
        raise TypeError(f"no number of a round: {index!r}")
    if next(reversed(history.rounds), -1) >= index:
        history.rounds = {done: kept for done, kept in history.rounds.items() if done < index}
        history.num_forgotten += 1
    still = [item for item in history.evaluations if item.label not in ("round", VALIDATION) or item.round <= index]
    history.num_forgotten += len(still) < len(history.evaluations)
    history.evaluations = still
    history.rounds[index] = event


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
        time_s=event["time_s"],
        drawn_s=drawn_s,
        score=_score(event),
        schedules=schedules,
    )


def _score(counts: Mapping[str, Any]) -> Score:
    return Score(num_correct=counts["num_correct"], num_problems=counts["num_problems"])


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """For each value the mean of the last `width` up to it."""
    windows = [values[max(0, index + 1 - width) : index + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]
