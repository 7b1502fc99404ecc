"""Results of a run for `d1 status`: tables, curves and the newest completions.

Names, prompts and completions are untrusted text. They are printed as `Text`, which interprets no markup, with control
characters made visible.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.run_log import SAMPLES
from deploy.printing import metric, printable, sparkline
from deploy.runs.listing import Run
from deploy.runs.result_tables import result_tables
from deploy.runs.status_view import grid

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.panel import Panel

_NUM_SAMPLES = 3
_LONGEST_TEXT = 2000


def results_view(run: Run) -> Iterator[RenderableType]:
    """Yield what is printed below the status of a run."""
    if run.history.evaluations:
        yield from result_tables(run.events)
    yield grid(_curves(run))
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
        "SFT loss": [step["loss"] for step in history.steps.get("sft", [])],
        "held-out loss": [evaluated["loss"] for evaluated in history.sft_losses.get("sft", [])],
        "validation %": [100 * item.score.accuracy for item in history.validation],
        "held-out %": accuracies,
    }
    for name, values in series.items():
        if values:
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
