"""Training curves: the plot is drawn from whatever data a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.runs.curves import draw_curves

Events = list[dict[str, Any]]


def _width(path: Path) -> int:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20])


def test_a_whole_run_fills_three_columns(events: Events, tmp_path: Path) -> None:
    draw_curves(events, tmp_path / "curves.png")
    assert _width(tmp_path / "curves.png") == pytest.approx(3 * 4.2 * 150, abs=2)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_panels_without_data_are_left_out(events: Events, tmp_path: Path) -> None:
    sft_only = [event for event in events if event["time_s"] < 35]
    draw_curves(sft_only, tmp_path / "curves.png")
    assert _width(tmp_path / "curves.png") == pytest.approx(2 * 4.2 * 150, abs=2)


def test_one_round_and_odd_numbers_are_drawn(recorder: Any, tmp_path: Path) -> None:
    recorder.add("run", name="$\\frac$ [b]", seed=0, commit="", hardware="", versions={})
    recorder.round(0, float("nan"))
    draw_curves(recorder.events, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").is_file()


def test_nothing_is_not_drawn(tmp_path: Path) -> None:
    draw_curves([], tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []
