"""Views of a run: its status, in rows of at most 80 columns for people and as JSON, and its results so far.

Names, prompts and completions are untrusted text. They are printed as `Text`, which interprets no markup, with control
characters made visible.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.coordination.reporting.status import SILENT_S, ActorState, ActorStatus, RunStatus
from actors.coordination.reporting.timeline import TIMELINE, Span, idle_shares, num_rounds, read_trace
from actors.run_log import SAMPLES
from deploy.printing import counted, duration, metric, printable, sparkline
from deploy.runs.history import RunHistory
from deploy.runs.listing import Run
from deploy.runs.result_tables import result_tables
from deploy.runs.stages import STAGES

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.panel import Panel
    from rich.table import Table

_MOST_ACTORS, _MOST_FAILURES, _LONGEST_FAILURE = 8, 3, 200
_IDLE_IN_ROW = 3
_NUM_SAMPLES, _LONGEST_TEXT = 3, 2000

Rows = Iterator[tuple[str, str]]


def status_view(run: Run) -> Group:
    """Build a headline, and rows of what is known."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(f"{printable(run.name)}: {_state(run)}", style="bold"), _grid(_rows(run)))


def _grid(rows: Rows) -> Table:
    """Lay out names and values; a name that repeats is shown once."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for name, value in rows:
        table.add_row(Text("" if name == before else name, style="dim"), Text(printable(value)))
        before = name
    return table


def json_of(run: Run) -> str:
    """Format the same as JSON: `status` has the fields of `RunStatus`, or is null."""
    return json.dumps(
        {
            "run": run.name,
            "directory": str(run.directory),
            "is_running": run.is_running,
            "age_s": round(run.age_s, 3),
            "status": None if run.status is None else asdict(run.status),
            "idle": {track: round(share, 3) for track, share in idle_shares(_spans(run)).items()},
        }
    )


def _state(run: Run) -> str:
    """Describe whether it runs, and how long it has been silent."""
    heard = f"last update {duration(run.age_s)} ago"
    holder, is_finished = run.holder, run.history.is_finished
    if holder is not None:
        who = f"process {holder.pid} since {holder.since}"
        if run.status is None or run.status.at < holder.began_at:
            return f"starting ({who}); no status yet"
        if is_finished:
            return f"finished; its process still runs ({who}), as with --serve"
        return f"running ({who}); " + (heard if run.age_s < SILENT_S else f"silent: {heard}")
    if is_finished:
        return f"finished, {duration(run.age_s)} ago"
    if run.has_ended:
        return f"stopped, {heard}"
    # Its process, if any, is on another machine.
    return f"running; {heard}" if run.is_running else f"stopped or unreachable: {heard}"


def _rows(run: Run) -> Rows:
    status = run.status
    if status is not None:
        yield "stage", _stage(status, run.history)
        if run.is_running:
            yield from _under_way(status)
        yield "staleness", f"{status.staleness:.2g} versions in the newest round, {status.max_staleness} at most"
        restarts = (f"{name} {count}" for name, count in status.num_restarts.items() if count)
        yield "restarts", ", ".join(restarts) or "none"
        if status.seconds:
            total = sum(status.seconds.values()) or 1.0
            shares = [f"{name} {duration(took)} ({100 * took / total:.0f} %)" for name, took in status.seconds.items()]
            yield "newest round", ", ".join(shares)
    if idle := idle_shares(spans := _spans(run)):
        number = num_rounds(spans)
        yield "idle", f"share of the time of the newest {'round' if number == 1 else f'{number} rounds'}:"
        shares = [f"{track} {100 * share:.0f} %" for track, share in idle.items()]
        for index in range(0, len(shares), _IDLE_IN_ROW):
            yield "idle", ", ".join(shares[index : index + _IDLE_IN_ROW])
    if status is not None and run.is_running:
        for what in status.waits or ("none longer than usual",):
            yield "waits", what
    yield from _failures(run)


def _stage(status: RunStatus, history: RunHistory) -> str:
    name = STAGES[status.stage].name if status.stage in STAGES else status.stage
    steps, planned = history.steps.get(status.stage, []), history.planned.get(status.stage, 0)
    if status.stage == "rl":
        name = f"{name}, {status.round} of {status.num_rounds} rounds done"
    elif steps:
        name = f"{name}, step {steps[-1]['step']}" + (f" of {planned}" if planned else "")
    return f"{name}; policy version {status.policy_version}"


def _under_way(status: RunStatus) -> Rows:
    for rank, doing in sorted(status.learner.items(), key=lambda item: int(item[0])):
        yield "learner", f"rank {rank}  {doing}"
    for kind in dict.fromkeys(actor.name.rpartition(" ")[0] for actor in status.pools):
        yield from _pool(f"{kind}s", [actor for actor in status.pools if actor.name.startswith(f"{kind} ")])
    if status.work_units:
        yield "work units", ", ".join(f"{count} {state}" for state, count in status.work_units.items())


def _pool(name: str, actors: list[ActorStatus]) -> Rows:
    """Count the actors by state, then list unreachable and busy ones, longest first."""
    by_state = {state: [actor for actor in actors if actor.state is state] for state in ActorState}
    yield name, ", ".join(f"{len(found)} {state}" for state, found in by_state.items())
    for state in (ActorState.UNREACHABLE, ActorState.BUSY):
        longest = sorted(by_state[state], key=lambda actor: -actor.seconds)
        for actor in longest[:_MOST_ACTORS]:
            yield name, f"{actor.name}  {actor.work_unit or 'unreachable'} for {duration(actor.seconds)}"
        if len(longest) > _MOST_ACTORS:
            yield name, f"and {len(longest) - _MOST_ACTORS} more {state}"


def _failures(run: Run) -> Rows:
    """List the newest failures of the run log, including those that needed no retry."""
    failures = [event for event in run.events if event["event"] == "failure"]
    if failures:
        number = run.history.num_failures
        yield "failures", f"{counted(number, 'failure')} survived; the newest entries of the run log:"
    for event in failures[-_MOST_FAILURES:]:
        what = str(event["what"]).partition("\n")[0][:_LONGEST_FAILURE]
        yield "failures", f"at {duration(event['time_s'])}: {what}"


def _spans(run: Run) -> list[Span]:
    """Return the work of the actors in the newest rounds."""
    return read_trace(run.directory / TIMELINE)


def results_view(run: Run) -> Iterator[RenderableType]:
    """Yield what is printed below the status of a run."""
    if run.history.evaluations:
        yield from result_tables(run.events)
    yield _grid(_curves(run))
    yield from map(_sample_panel, _last_samples(run.directory))


def _last_samples(directory: Path) -> list[dict[str, Any]]:
    """Read the newest completions of a run; a last line that a crash truncated is left out."""
    path = directory / SAMPLES
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line for line in file if line.endswith("\n")), maxlen=_NUM_SAMPLES)
    return [json.loads(line) for line in lines]


def _curves(run: Run) -> Iterator[tuple[str, str]]:
    history = run.history
    accuracies = [100 * item.score.accuracy for item in history.heldout]
    series = {
        "reward": history.series("reward"),
        "share correct": history.series("correct"),
        "preferred": history.series("preferred"),
        "SFT loss": [step["loss"] for step in history.steps.get("sft", [])],
        "held-out loss": [evaluated["loss"] for evaluated in history.sft_losses.get("sft", [])],
        "validation %": [100 * item.score.accuracy for item in history.validation],
        "held-out %": accuracies,
    }
    for name, values in series.items():
        if any(map(math.isfinite, values)):
            yield name, f"{metric(values[0]):>7} {sparkline(values)} {metric(values[-1])}"


def _sample_panel(sample: dict[str, Any]) -> Panel:
    from rich.panel import Panel
    from rich.text import Text

    parts = ", ".join(f"{name} {metric(value)}" for name, value in sample["reward_parts"].items())
    verdict = "right" if sample["correct"] else "wrong"
    num_steps = max(sample["step_map"], default=-1) + 1
    head = (
        f"round {sample['round']}, version {sample['policy_version']}, {sample['problem_id']}: {verdict}, "
        f"reward {metric(sample['reward'])} ({parts}), {num_steps} denoise steps"
    )
    body = Text(printable(sample["prompt"][-_LONGEST_TEXT:]), style="dim")
    body.append("\n")
    body.append(printable(sample["completion"][:_LONGEST_TEXT]), style="green" if sample["correct"] else "none")
    return Panel(body, title=Text(printable(head)), title_align="left", border_style="dim")
