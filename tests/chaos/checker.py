"""Checks of a run with faults against d1's guarantees (docs/reliability.md). Pure: from records to sentences.

A run that returned to a checkpoint repeats rounds. The last event of a round counts, and must equal the earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actors.run_log import Event
from tests.chaos.faults import MAY_END_RUN, FaultKind, FaultOutcome, Platform, Target
from tests.chaos.record import History, InjectedFault, Launch, RunRecord

MAX_SILENCE_S = 30.0
"""Longest allowed time without output."""
UNREPEATABLE = frozenset(
    {
        *("time_s", "tokens_per_s", "flop_per_s", "mfu", "peak_memory_bytes", "sampling_s", "training_s", "publish_s"),
        *("seconds", "name", "began_at", "num_retries", "pools"),
    }
)
"""Values of an event that depend on the clock or on the process that wrote them."""
_CRASH = re.compile(r"Traceback \(most recent call last\)|\*\*\* SIG\w+|Fatal Python error|Segmentation fault")
_RESTART = re.compile(r"\brestart|\bresume")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRecipe:
    """Recipe values that the checks need."""

    num_rounds: int
    """Number of rounds."""
    groups_per_round: int
    """Groups of each round."""
    group_size: int
    """Completions of each group."""
    max_staleness: int
    """Bound of staleness; at 0 a run depends on its recipe alone."""
    checkpoints: tuple[str, ...]
    """Checkpoints that a complete run has at least."""


def violations(recipe: CheckedRecipe, reference: History, record: RunRecord) -> list[str]:
    """Return a sentence for each violation of a guarantee."""
    history = record.history
    found = [*_completeness(recipe, history), *_repetitions(history), *_groups(recipe, history)]
    found += _versions(recipe, history)
    if recipe.max_staleness == 0:
        found += [*_numbers(reference, history), *_weights(recipe, reference, history)]
    for number, launch in enumerate(record.launches, start=1):
        found += [f"`d1 train` number {number}: {what}" for what in _launch(record, launch)]
    found += [what for injected in record.injected for what in _injected(record, injected)]
    return [f"{record.name}: {what}" for what in found]


def _final_rounds(history: History) -> dict[int, Event]:
    """Return the last event of each round, by its index."""
    return {event["round"]: event for event in history.events if event["event"] == "round"}


def _completeness(recipe: CheckedRecipe, history: History) -> Iterator[str]:
    if history.num_unreadable:
        yield f"metrics.jsonl has {history.num_unreadable} lines that are not events, or follow one"
    if not any(event["event"] == "done" for event in history.events):
        yield "the run is not complete: its log has no `done`"
    if lost := sorted(set(range(recipe.num_rounds)) - _final_rounds(history).keys()):
        yield f"rounds {_list(lost)} are lost: the log has no event of them"


def _repetitions(history: History) -> Iterator[str]:
    """Rounds follow each other, and a round is repeated only after a restart."""
    previous, has_restarted = -1, True
    for event in history.events:
        if event["event"] in ("phase", "failure"):
            has_restarted |= event["event"] == "phase" or bool(_RESTART.search(event["what"]))
        if event["event"] != "round":
            continue
        index = event["round"]
        if index <= previous and not has_restarted:
            yield f"round {index} was trained twice: it follows round {previous} without a restart"
        if index > previous + 1:
            yield f"round {index} follows round {previous}: those between were not trained"
        previous, has_restarted = index, False


def _groups(recipe: CheckedRecipe, history: History) -> Iterator[str]:
    for index, event in sorted(_final_rounds(history).items()):
        failed, graded = event["num_failed_groups"], event["num_completions"]
        ungraded = sum(event["num_ungraded"].values())
        # Includes groups that replace others.
        num_groups = event.get("num_sampled_groups", recipe.groups_per_round)
        admitted = num_groups * recipe.group_size
        if graded + ungraded + failed * recipe.group_size < admitted:
            yield f"round {index} lost groups: {graded} completions and {failed} failed groups of {admitted}"
        if graded > (num_groups - failed) * recipe.group_size:
            yield f"round {index} trained groups twice: {graded} completions and {failed} failed groups of {admitted}"


def _versions(recipe: CheckedRecipe, history: History) -> Iterator[str]:
    rounds = _final_rounds(history)
    for index, event in sorted(rounds.items()):
        if event["max_staleness"] > recipe.max_staleness or event["mean_staleness"] < 0:
            yield f"round {index} mixed versions: up to {event['max_staleness']:g} older than the policy it trained"
        before = rounds.get(index - 1)
        if before is not None and event["policy_version"] != before["policy_version"] + 1:
            yield f"round {index} published version {event['policy_version']} after {before['policy_version']}"
    for sample in history.samples:
        if sample["round"] in rounds:
            newest = rounds[sample["round"]]["policy_version"] - 1
            if not newest - recipe.max_staleness <= sample["policy_version"] <= newest:
                yield f"round {sample['round']} has a completion of version {sample['policy_version']}, not of {newest}"


def _numbers(reference: History, history: History) -> Iterator[str]:
    """Compare every event, repeated ones too, with the reference run's."""
    expected = {_subject(event): _repeatable(event) for event in reference.events if _subject(event)}
    reported = set()
    for event in history.events:
        subject = _subject(event)
        if not subject or subject in reported:
            continue
        if subject not in expected:
            reported.add(subject)
            yield f"{subject} is not in the reference run"
        elif (found := _repeatable(event)) != (right := expected[subject]):
            reported.add(subject)
            names = [name for name in right if found.get(name) != right[name]] or sorted(found.keys() - right.keys())
            one = names[0]
            yield f"{subject} differs in {_list(names)}: {one} is {found.get(one)} and not {right.get(one)}"


def _repeatable(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in UNREPEATABLE}


def _subject(event: Event) -> str:
    """Return what an event reports on; empty if it is not compared."""
    match event["event"]:
        case "round":
            return f"round {event['round']}"
        case "evaluation":
            return f"the evaluation {event['label']} {event['round']}"
        case "sft_eval":
            return f"the loss of {event['phase']} after {event['step']} steps"
        case "sft_data":
            return "the data of SFT"
    return ""


def _weights(recipe: CheckedRecipe, reference: History, history: History) -> Iterator[str]:
    for name in sorted({*recipe.checkpoints} - history.digests.keys()):
        yield f"checkpoint {name} is missing"
    for name in sorted(reference.digests.keys() & history.digests.keys()):
        if reference.digests[name] != history.digests[name]:
            yield f"the weights of checkpoint {name} differ from the reference run's"


def _launch(record: RunRecord, launch: Launch) -> Iterator[str]:
    yield from _silences(record, launch)
    if (line := next((line.text for line in launch.lines if _CRASH.search(line.text)), None)) is not None:
        yield f"it printed {line.strip()[:100]!r}"
    if launch.leftovers and record.platform is not Platform.CLUSTER:
        yield f"{len(launch.leftovers)} processes were left: {_list(launch.leftovers)}"
    injected = _during(record, launch)
    if launch.was_stuck:
        if not any(one.outcome is FaultOutcome.STUCK for one in injected):
            yield f"it made no progress and was killed; its last line was {_last_line(launch)!r}"
        return
    if launch.status == 0:
        return
    if not injected:
        yield f"it ended with status {launch.status} without a fault: {_last_line(launch)!r}"
        return
    cause = injected[-1].fault
    if (cause.target, cause.kind) == (Target.DRIVER, FaultKind.KILL):
        return
    if not any("--resume" in line.text for line in launch.lines[-20:]):
        last = _last_line(launch)
        yield f"it ended with status {launch.status} after {cause} without saying how to resume: {last!r}"


def _silences(record: RunRecord, launch: Launch) -> Iterator[str]:
    times = [launch.began_s, *(line.at_s for line in launch.lines if line.at_s < launch.ended_s), launch.ended_s]
    lines = ["its start", *(line.text.strip()[:70] for line in launch.lines)]
    for began, ended, line in zip(times, times[1:], lines, strict=False):
        silent_s = ended - began - _stopped_s(record.injected, began, ended)
        if silent_s > MAX_SILENCE_S:
            faults = [str(one.fault) for one in record.injected if began - MAX_SILENCE_S < one.began_s < ended]
            yield f"{silent_s:.0f} s without output after {line!r}" + (f", {_list(faults)}" if faults else "")


def _stopped_s(injected: Sequence[InjectedFault], began: float, ended: float) -> float:
    """Return the seconds of an interval in which the driver itself was stopped."""
    stops = [one for one in injected if (one.fault.target, one.fault.kind) == (Target.DRIVER, FaultKind.STOP)]
    return sum(max(0.0, min(ended, stop.ended_s) - max(began, stop.began_s)) for stop in stops)


def _during(record: RunRecord, launch: Launch) -> list[InjectedFault]:
    return [one for one in record.injected if launch.began_s <= one.began_s <= launch.ended_s]


def _injected(record: RunRecord, injected: InjectedFault) -> Iterator[str]:
    fault, outcome = injected.fault, injected.outcome
    may_resume = fault.target in MAY_END_RUN or _ended_by_earlier(record, injected)
    if outcome is FaultOutcome.STUCK or (outcome is FaultOutcome.RESUMED and not may_resume):
        what = {
            FaultOutcome.RESUMED: "the run ended and was resumed",
            FaultOutcome.STUCK: "the run got stuck and was killed",
        }[outcome]
        yield f"fault {fault.number}, {fault} ({injected.victim}, round {injected.round}): {what}"
    if fault.kind is FaultKind.FLIP:
        failures = [str(event["what"]) for event in record.history.events if event["event"] == "failure"]
        if not any(injected.victim in what and "damaged" in what for what in failures):
            yield f"fault {fault.number}, {fault}: no event says that checkpoint {injected.victim} is damaged"


def _ended_by_earlier(record: RunRecord, injected: InjectedFault) -> bool:
    """Whether an earlier SIGTERM may have ended the run: a process finishes its current call first.

    Ray Train's controller has a single call, which lasts as long as the training.
    """
    return any(
        one.fault.kind is FaultKind.TERM and one.began_s < injected.began_s and one.fault.target in MAY_END_RUN
        for launch in record.launches
        if launch.began_s <= injected.began_s <= launch.ended_s
        for one in _during(record, launch)
    )


def _last_line(launch: Launch) -> str:
    return next((line.text.strip()[:200] for line in reversed(launch.lines) if line.text.strip()), "")


def _list(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:6])
    return shown if len(items) <= 6 else f"{shown} and {len(items) - 6} more"
