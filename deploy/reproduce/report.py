"""What a reproduction leaves for readers: `table.md`, `table.json` and `curves.png` in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.run_log import read_events
from actors.whole_file import write_whole
from deploy.printing import duration
from deploy.reproduce.execute import is_complete
from deploy.reproduce.figure import draw
from deploy.reproduce.plan import Step, Training
from deploy.reproduce.scale import Scale
from deploy.reproduce.table import as_json, as_markdown, read_cells

TABLE, CELLS, CURVES = "table.md", "table.json", "curves.png"


def write_report(scale: Scale, name: str, steps: Sequence[Step], rows: Sequence[str], out: Path) -> str:
    """Write what there is so far. Returns the table as Markdown."""
    cells, facts = read_cells(steps, out), _facts(scale, name, steps, out)
    text = as_markdown(cells, rows, facts)
    write_whole(out / TABLE, text)
    write_whole(out / CELLS, as_json(cells, facts))
    draw(steps, cells, rows, out / CURVES)
    return text


def _facts(scale: Scale, name: str, steps: Sequence[Step], out: Path) -> dict[str, Any]:
    """Where the numbers come from, by the trainings' own run logs."""
    logs = [events for step in steps if isinstance(step, Training) and (events := read_events(step.recipe.run_dir))]
    begun = [event for events in logs for event in events if event["event"] == "run"]
    num_done = sum(is_complete(step, out) for step in steps)
    return {
        "title": f"d1's table, {name}",
        "about": scale.about,
        "commit": ", ".join(dict.fromkeys(event["commit"] for event in begun)) or "none yet",
        "hardware": ", ".join(dict.fromkeys(event["hardware"] for event in begun)) or "none yet",
        "training_took": duration(sum(events[-1]["time_s"] for events in logs)),
        "steps_done": f"{num_done} of {len(steps)}",
    }
