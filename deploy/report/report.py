"""HTML report of one or several runs: a single file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import UserError, os_errors
from deploy.printing import duration, printable, share
from deploy.report.differences import Field, fields_of
from deploy.report.eval_results import EvalCell, read_eval_cells
from deploy.report.examples import ReportExample
from deploy.report.figures import plots
from deploy.report.pareto import quality_by_compute
from deploy.runs.history import RunHistory, ScheduleScore
from deploy.runs.listing import Run
from deploy.runs.result_tables import HEADINGS, evaluated_at_schedules, result_rows, schedule_names

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_report(runs: Mapping[str, Run], examples: Mapping[str, Sequence[ReportExample]], out: Path) -> None:
    """Write the report of runs, by name.

    Raises UserError if a run has nothing to report yet, or the file cannot be written.
    """
    for name, run in runs.items():
        if not (run.history.evaluations or run.history.rounds):
            raise UserError(f"the run {name} has not begun: it has no evaluation and no round to report yet")
    text = _render(runs, examples)
    with os_errors(f"cannot write the report to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def _render(runs: Mapping[str, Run], examples: Mapping[str, Sequence[ReportExample]]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    histories = {name: run.history for name, run in runs.items()}
    fields = fields_of([run.recipe for run in runs.values()])
    cells = {name: found for name, run in runs.items() if (found := read_eval_cells(run.directory))}
    return environment.get_template(_TEMPLATE).render(
        title=printable(" and ".join(runs)),
        subtitle="; ".join(_standing(name, run) for name, run in runs.items()),
        names=[printable(name) for name in runs],
        tables=[_results(histories), *_schedules(histories), *_evaluations(cells)],
        plots=[*quality_by_compute(cells), *plots(histories)],
        examples={printable(name): some for name, some in examples.items()},
        different=[_printable(field) for field in fields if field.differs],
        common=[_printable(field) for field in fields if not field.differs],
    )


def _standing(name: str, run: Run) -> str:
    history = run.history
    failures = f", {history.num_failures} failures survived" if history.num_failures else ""
    rounds = f"{len(history.rounds)} rounds, {duration(history.seconds)}{failures}"
    return printable(f"{name}: {run.task}, {run.state}, {rounds}")


def _printable(field: Field) -> Field:
    return Field(path=printable(field.path), values=tuple(map(printable, field.values)))


def _results(histories: Mapping[str, RunHistory]) -> Table:
    """Build a table with a row per evaluated policy: its accuracy, and the time and work of its stage."""
    rows = [
        (printable(f"{name}: {policy}"), *cells)
        for name, history in histories.items()
        for policy, *cells in result_rows(history)
    ]
    return Table(title="Held-out accuracy", head=HEADINGS, rows=rows, note="95 % intervals are Wilson's.")


def _schedules(histories: Mapping[str, RunHistory]) -> Iterable[Table]:
    """Yield a table of accuracy by schedule, if several were evaluated."""
    found = [
        (f"{name}: {policy}", item)
        for name, history in histories.items()
        for policy, item in evaluated_at_schedules(history)
    ]
    names = schedule_names(item for _, item in found)
    if names:
        rows = [[printable(policy), *(_percent(item.schedules.get(name)) for name in names)] for policy, item in found]
        yield Table(title="By schedule, %", head=("policy", *names), rows=rows)


def _evaluations(cells: Mapping[str, Sequence[EvalCell]]) -> Iterable[Table]:
    """Yield tables of the results of `d1 eval` on each run, with a column per policy."""
    for name, found in cells.items():
        for setting in dict.fromkeys(one.setting for one in found):
            by_place: dict[tuple[int, str], dict[str, str]] = {}
            for one in found:
                if one.setting == setting:
                    by_place.setdefault((one.gen_length, one.schedule), {})[one.checkpoint] = _solved(one)
            policies = sorted({policy for row in by_place.values() for policy in row}, key=_by_stage)
            rows = [
                (str(length), schedule, *(row.get(policy, "") for policy in policies))
                for (length, schedule), row in by_place.items()
            ]
            note = "% solved, as d1 eval asked it, with 95 % intervals; of adaptive schedules with their mean steps."
            title = printable(f"By length and schedule: {name}, {setting}")
            yield Table(title=title, head=("slots", "denoising", *policies), rows=rows, note=note)


def _by_stage(policy: str) -> tuple[bool, bool, str]:
    """Return a sort key: SFT, then the control, then the others by name."""
    return policy != "sft", policy != "control", policy


def _solved(one: EvalCell) -> str:
    return share(one.accuracy, one.interval) + (f" in {one.mean_forwards:.1f}" if one.is_adaptive else "")


def _percent(scored: ScheduleScore | None) -> str:
    return "" if scored is None else share(scored.score.accuracy, scored.score.interval)
