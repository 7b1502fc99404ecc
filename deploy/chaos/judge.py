"""Whether a disturbed run is what it would have been undisturbed. Pure: from records to sentences.

A run that went back to a checkpoint repeats rounds: of two events of one round the later counts, and says the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actors.run_log import Event
from deploy.chaos.expectations import ALLOWED, FaultOutcome
from deploy.chaos.faults import Harm, Setting, Target
from deploy.chaos.record import Blow, Drive, History, RunRecord

SILENCE_S = 30.0
"""The longest that a run may be without a word."""
UNREPEATABLE = frozenset(
    {
        *("time_s", "tokens_per_s", "flop_per_s", "mfu", "peak_memory_bytes", "sampling_s", "training_s", "publish_s"),
        *("seconds", "name", "began_at", "num_retries", "pools"),
    }
)
"""What depends on the clock, or on which process did it."""
_NATIVE = re.compile(r"Traceback \(most recent call last\)|\*\*\* SIG\w+|Fatal Python error|Segmentation fault")
_RESTARTED = re.compile(r"\brestart|\bresume")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRecipe:
    """What of the recipe the judge must know."""

    num_rounds: int
    """Rounds."""
    groups_per_round: int
    """Groups of each."""
    group_size: int
    """Completions of a group."""
    max_staleness: int
    """The bound; at 0 a run's numbers depend on its recipe alone."""
    phases: tuple[str, ...]
    """The checkpoints that a complete run has at least."""


def judge(terms: JudgedRecipe, reference: History, record: RunRecord) -> list[str]:
    """What a run did that it must not: a sentence for each, none for an honest history."""
    history = record.history
    found = [*_files(history), *_completeness(terms, history), *_repetitions(history), *_groups(terms, history)]
    found += _versions(terms, history)
    if terms.max_staleness == 0:
        found += [*_numbers(reference, history), *_weights(terms, reference, history)]
    for number, drive in enumerate(record.drives, start=1):
        found += [f"`d1 train` number {number}: {what}" for what in _drive(record, drive)]
    found += [what for blow in record.blows for what in _blow(record, blow)]
    return [f"{record.name}: {what}" for what in found]


def final_rounds(events: Sequence[Event]) -> dict[int, Event]:
    """The event of each round that counts, by its index."""
    return {event["round"]: event for event in events if event["event"] == "round"}


def repeatable(event: Event) -> dict[str, Any]:
    """An event without what depends on the clock."""
    return {name: value for name, value in event.items() if name not in UNREPEATABLE}


def _files(history: History) -> Iterator[str]:
    if history.num_unreadable:
        yield f"metrics.jsonl has {history.num_unreadable} lines that are no events or come after one"


def _completeness(terms: JudgedRecipe, history: History) -> Iterator[str]:
    if not any(event["event"] == "done" for event in history.events):
        yield "the run never ended: its log has no `done`"
    if lost := sorted(set(range(terms.num_rounds)) - final_rounds(history.events).keys()):
        yield f"rounds {_list(lost)} are lost: the log has no event of theirs"


def _repetitions(history: History) -> Iterator[str]:
    """Rounds follow each other; a round comes again only after a restart, and then says the same."""
    previous, has_restarted = -1, True
    first: dict[int, Event] = {}
    for event in history.events:
        if event["event"] in ("phase", "failure"):
            has_restarted |= event["event"] == "phase" or bool(_RESTARTED.search(event["what"]))
        if event["event"] != "round":
            continue
        index = event["round"]
        if index <= previous and not has_restarted:
            yield f"round {index} was trained twice: it comes after round {previous} and nothing restarted"
        if index > previous + 1:
            yield f"round {index} came after round {previous}: those between were not trained"
        previous, has_restarted = index, False
        first.setdefault(index, event)


def _groups(terms: JudgedRecipe, history: History) -> Iterator[str]:
    for index, event in sorted(final_rounds(history.events).items()):
        failed, graded = event["num_failed_groups"], event["num_completions"]
        ungraded = sum(event["num_ungraded"].values())
        # Those that replace others are among them.
        num_groups = event.get("num_sampled_groups", terms.groups_per_round)
        admitted = num_groups * terms.group_size
        if graded + ungraded + failed * terms.group_size < admitted:
            yield f"round {index} lost groups: {graded} completions and {failed} failed groups of {admitted}"
        if graded > (num_groups - failed) * terms.group_size:
            yield f"round {index} trained groups twice: {graded} completions and {failed} failed groups of {admitted}"


def _versions(terms: JudgedRecipe, history: History) -> Iterator[str]:
    rounds = final_rounds(history.events)
    for index, event in sorted(rounds.items()):
        if event["max_staleness"] > terms.max_staleness or event["mean_staleness"] < 0:
            yield f"round {index} mixed versions: up to {event['max_staleness']:g} older than the policy it trained"
        before = rounds.get(index - 1)
        if before is not None and event["policy_version"] != before["policy_version"] + 1:
            yield f"round {index} published version {event['policy_version']} after {before['policy_version']}"
    for sample in history.samples:
        if sample["round"] in rounds:
            newest = rounds[sample["round"]]["policy_version"] - 1
            if not newest - terms.max_staleness <= sample["policy_version"] <= newest:
                yield f"round {sample['round']} has a completion of version {sample['policy_version']}, not of {newest}"


def _numbers(reference: History, history: History) -> Iterator[str]:
    """What the two runs say of the same thing; every time that they say it."""
    expected = {_subject(event): repeatable(event) for event in reference.events if _subject(event)}
    seen = set()
    for event in history.events:
        subject = _subject(event)
        if not subject or subject in seen:
            continue
        if subject not in expected:
            seen.add(subject)
            yield f"{subject} is not in the undisturbed run"
        elif (said := repeatable(event)) != (right := expected[subject]):
            seen.add(subject)
            names = [name for name in right if said.get(name) != right[name]]
            one = names[0] if names else sorted(said.keys() - right.keys())[0]
            yield f"{subject} differs in {_list(names or [one])}: {one} is {said.get(one)} and not {right.get(one)}"


def _subject(event: Event) -> str:
    """What an event is of; empty for one that is not compared."""
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


def _weights(terms: JudgedRecipe, reference: History, history: History) -> Iterator[str]:
    for name in sorted({*terms.phases} - history.digests.keys()):
        yield f"checkpoint {name} is missing"
    for name in sorted(reference.digests.keys() & history.digests.keys()):
        if reference.digests[name] != history.digests[name]:
            yield f"the weights of checkpoint {name} are not those of the undisturbed run"


def _drive(record: RunRecord, drive: Drive) -> Iterator[str]:
    yield from _silences(record, drive)
    if (line := next((line.text for line in drive.lines if _NATIVE.search(line.text)), None)) is not None:
        yield f"it printed {line.strip()[:100]!r}"
    if drive.leftovers and record.setting is not Setting.CLUSTER:
        yield f"{len(drive.leftovers)} processes were left: {_list(drive.leftovers)}"
    if drive.was_helped and not any(blow.outcome is FaultOutcome.STUCK for blow in _during(record, drive)):
        yield f"it made no progress and had to be killed; its last word was {_last_word(drive)!r}"
    if drive.status == 0 or drive.was_helped:
        return
    cause = _cause(record, drive)
    if cause is None:
        yield f"it ended with status {drive.status} though nothing was done to it: {_last_word(drive)!r}"
        return
    if cause.fault.target is Target.DRIVER and cause.fault.harm is Harm.KILL:
        return
    if not any("--resume" in line.text for line in drive.lines[-20:]):
        word = _last_word(drive)
        yield f"it ended with status {drive.status} after {cause.fault} without saying how to resume: {word!r}"


def _silences(record: RunRecord, drive: Drive) -> Iterator[str]:
    times = [drive.began_s, *(line.at_s for line in drive.lines if line.at_s < drive.ended_s), drive.ended_s]
    words = ["its start", *(line.text.strip()[:70] for line in drive.lines)]
    for began, ended, word in zip(times, times[1:], words, strict=False):
        silent_s = ended - began - _stopped_s(record.blows, began, ended)
        if silent_s > SILENCE_S:
            under_way = [str(blow.fault) for blow in record.blows if began - SILENCE_S < blow.at_s < ended]
            after = f", {_list(under_way)}" if under_way else ""
            yield f"{silent_s:.0f} s without a word after {word!r}{after}"


def _stopped_s(blows: Sequence[Blow], began: float, ended: float) -> float:
    """Seconds of an interval for which the driver itself could not speak: it was stopped."""
    stops = [blow for blow in blows if blow.fault.target is Target.DRIVER and blow.fault.harm is Harm.STOP]
    return sum(max(0.0, min(ended, blow.over_at_s) - max(began, blow.at_s)) for blow in stops)


def _cause(record: RunRecord, drive: Drive) -> Blow | None:
    """What was last done to a run before a `d1 train` of it ended."""
    before = _during(record, drive)
    return before[-1] if before else None


def _during(record: RunRecord, drive: Drive) -> list[Blow]:
    return [blow for blow in record.blows if drive.began_s <= blow.at_s <= drive.ended_s]


def _blow(record: RunRecord, blow: Blow) -> Iterator[str]:
    if blow.outcome not in ALLOWED[blow.fault.target] and not _is_an_earlier_ones(record, blow):
        what = {
            FaultOutcome.RESUMED: "the run ended and had to be resumed",
            FaultOutcome.STUCK: "the run got stuck and had to be killed",
            FaultOutcome.WENT_ON: "the run went on",
        }[blow.outcome]
        yield f"fault {blow.fault.number}, {blow.fault} ({blow.victim}, round {blow.round}): {what}"
    if blow.fault.harm is Harm.FLIP:
        said = [str(event["what"]) for event in record.history.events if event["event"] == "failure"]
        if not any(blow.victim in what and "damaged" in what for what in said):
            yield f"fault {blow.fault.number}, {blow.fault}: nobody said that checkpoint {blow.victim} is damaged"


def _is_an_earlier_ones(record: RunRecord, blow: Blow) -> bool:
    """Whether the run ended of a SIGTERM before: what is told to end finishes its call first.

    Ray Train's controller has one call, which ends when the training does.
    """
    drive = next((one for one in record.drives if one.began_s <= blow.at_s <= one.ended_s), None)
    return blow.outcome is FaultOutcome.RESUMED and any(
        one.fault.harm is Harm.TERM and one.at_s < blow.at_s and FaultOutcome.RESUMED in ALLOWED[one.fault.target]
        for one in (_during(record, drive) if drive else ())
    )


def _last_word(drive: Drive) -> str:
    return next((line.text.strip()[:200] for line in reversed(drive.lines) if line.text.strip()), "")


def _list(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:6])
    return shown if len(items) <= 6 else f"{shown} and {len(items) - 6} more"
