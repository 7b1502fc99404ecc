"""Views of a run's status: rows of at most 80 columns for people, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from actors.coordination.status import ActorState, ActorStatus, RunStatus
from deploy.printing import counted, duration, printable
from deploy.runs.history import RunHistory
from deploy.runs.status import SILENT_S, RunSnapshot

if TYPE_CHECKING:
    from rich.console import Group

_MOST_ACTORS, _MOST_FAILURES, _LONGEST_FAILURE = 8, 3, 200
_STAGES = {"untrained": "before training", "sft": "SFT", "rl": "rounds", "control": "control"}

Rows = Iterator[tuple[str, str]]


def status_view(standing: RunSnapshot) -> Group:
    """Build a headline, and rows of what is known."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    before = ""
    for name, value in _rows(standing):
        grid.add_row(Text("" if name == before else name, style="dim"), Text(printable(value)))
        before = name
    title = Text(f"{printable(standing.directory.name)}: {_state(standing)}", style="bold")
    return Group(title, grid)


def json_of(standing: RunSnapshot) -> str:
    """Format the same as JSON: `status` has the fields of `RunStatus`, or is null."""
    return json.dumps(
        {
            "run": standing.directory.name,
            "directory": str(standing.directory),
            "is_running": standing.is_running,
            "age_s": round(standing.age_s, 3),
            "status": None if standing.status is None else asdict(standing.status),
            "idle": {track: round(share, 3) for track, share in standing.idle.items()},
        }
    )


def _state(standing: RunSnapshot) -> str:
    """Describe whether it runs, and how long it has been silent."""
    heard = f"last heard of {duration(standing.age_s)} ago"
    holder, is_finished = standing.holder, standing.history.is_finished
    if holder is not None:
        who = f"process {holder.pid} since {_clock(holder.began_at)}"
        if standing.status is None or standing.status.at < holder.began_at:
            return f"starting ({who}); it has said nothing of itself yet"
        if is_finished:
            return f"finished; it still has a process ({who}), as with --serve"
        return f"running ({who}); " + (heard if standing.age_s < SILENT_S else f"silent: {heard}")
    if is_finished:
        return f"finished, {duration(standing.age_s)} ago"
    if standing.has_ended:
        return f"stopped, {heard}"
    # Its process, if any, is on another machine.
    return f"running; {heard}" if standing.is_running else f"stopped or unreachable: {heard}"


def _clock(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _rows(standing: RunSnapshot) -> Rows:
    status = standing.status
    if status is not None:
        yield "stage", _stage(status, standing.history)
        if standing.is_running:
            yield from _under_way(status)
        yield "staleness", f"{status.staleness:.2g} versions in the newest round, {status.max_staleness} at most"
        yield "restarts", _counts(status.num_restarts) or "none"
        if status.seconds:
            yield "newest round", _seconds(status.seconds)
    if standing.idle:
        rounds = "the newest round" if standing.num_rounds == 1 else f"the newest {standing.num_rounds} rounds"
        yield "idle", f"share of the time of {rounds}:"
        for row in _in_rows([f"{track} {100 * share:.0f} %" for track, share in standing.idle.items()]):
            yield "idle", row
    if status is not None and standing.is_running:
        for what in status.waits or ("nobody waits longer than usual",):
            yield "waits", what
    yield from _failures(standing)


def _stage(status: RunStatus, history: RunHistory) -> str:
    name = _STAGES.get(status.stage, status.stage)
    steps, planned = history.steps.get(status.stage, []), history.planned.get(status.stage, 0)
    if status.stage == "rl":
        name = f"rounds, {status.round} of {status.num_rounds} done"
    elif steps:
        name = f"{name}, step {steps[-1]['step']}" + (f" of {planned}" if planned else "")
    return f"{name}; policy version {status.policy_version}"


def _under_way(status: RunStatus) -> Rows:
    for rank, doing in sorted(status.learner.items(), key=lambda item: int(item[0])):
        yield "learner", f"rank {rank}  {doing}"
    for kind in dict.fromkeys(actor.name.rpartition(" ")[0] for actor in status.pools):
        yield from _pool(f"{kind}s", [actor for actor in status.pools if actor.name.startswith(f"{kind} ")])
    if status.portions:
        yield "portions", ", ".join(f"{count} {state}" for state, count in status.portions.items())


def _pool(name: str, actors: list[ActorStatus]) -> Rows:
    """Count the actors by state, then list unreachable and busy ones, longest first."""
    by_state = {state: [actor for actor in actors if actor.state is state] for state in ActorState}
    yield name, ", ".join(f"{len(found)} {state}" for state, found in by_state.items())
    for state in (ActorState.AWAY, ActorState.BUSY):
        longest = sorted(by_state[state], key=lambda actor: -actor.seconds)
        for actor in longest[:_MOST_ACTORS]:
            yield name, f"{actor.name}  {actor.portion or 'away'} for {duration(actor.seconds)}"
        if len(longest) > _MOST_ACTORS:
            yield name, f"and {len(longest) - _MOST_ACTORS} more {state}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _seconds(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    return ", ".join(f"{name} {duration(value)} ({100 * value / total:.0f} %)" for name, value in seconds.items())


def _in_rows(parts: list[str]) -> Iterator[str]:
    for index in range(0, len(parts), 3):
        yield ", ".join(parts[index : index + 3])


def _failures(standing: RunSnapshot) -> Rows:
    """List the newest failures of the run log, including those that needed no retry."""
    if standing.failures:
        number = standing.history.num_failures
        yield "failures", f"{counted(number, 'failure')} survived; the newest entries of the run log:"
    for event in standing.failures[-_MOST_FAILURES:]:
        what = str(event["what"]).partition("\n")[0][:_LONGEST_FAILURE]
        yield "failures", f"at {duration(event['time_s'])}: {what}"
