"""`d1 runs show`: everything about one run that fits on a screen.

Names, prompts and completions are untrusted text. They are printed as `Text`, which interprets no markup, with control
characters made visible.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.run_log import RECIPE, SAMPLES
from deploy.errors import UserError
from deploy.printing import duration, metric, printable, sparkline
from deploy.recipe.overrides import flat_fields, load_recipe
from deploy.runs.listing import Run
from deploy.runs.result_tables import result_tables

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

_NUM_SAMPLES = 3
_LONGEST_TEXT = 2000


def print_run(run: Run, console: Console) -> None:
    """Print one run."""
    from rich.text import Text

    history = run.history
    retries = f", {history.num_failures} failures survived" if history.num_failures else ""
    title = f"{printable(run.name)}: {run.state}, last event {duration(run.seconds_since_event)} ago{retries}"
    console.print(Text(title, style="bold"))
    console.print(_grid(_recipe(run)))
    if history.evaluations:
        for table in result_tables(run.events):
            console.print(table)
    console.print(_grid(_curves(run)))
    for path, event in history.checkpoints.items():
        console.print(Text(f"checkpoint {printable(path)}  policy version {event['policy_version']}"))
    for sample in last_samples(run.directory):
        console.print(_sample_panel(sample))


def last_samples(directory: Path) -> list[dict[str, Any]]:
    """Read the newest completions of a run; a last line that a crash truncated is left out."""
    path = directory / SAMPLES
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line for line in file if line.endswith("\n")), maxlen=_NUM_SAMPLES)
    return [json.loads(line) for line in lines]


def _recipe(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the fields of the recipe that are not at their default; all of a recipe that this d1 cannot read."""
    fields = run.recipe
    with suppress(UserError):
        fields = load_recipe(run.directory / RECIPE, []).model_dump(mode="json", exclude_defaults=True)
    for key, value in flat_fields(fields).items():
        yield key, str(value)


def _curves(run: Run) -> Iterator[tuple[str, str]]:
    history = run.history
    accuracies = [100 * item.score.accuracy for item in history.heldout]
    series = {
        "reward": history.series("reward"),
        "share correct": history.series("correct"),
        "SFT loss": [step["loss"] for step in history.steps.get("sft", [])],
        "held-out loss": [evaluated["loss"] for evaluated in history.sft_losses.get("sft", [])],
        "validation %": [100 * item.score.accuracy for item in history.validation],
        "held-out %": accuracies,
    }
    for name, values in series.items():
        if values:
            yield name, f"{metric(values[0]):>7} {sparkline(values)} {metric(values[-1])}"


def _grid(rows: Iterator[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(printable(value)))
    return grid


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
