"""Printing on a terminal: control characters in foreign text have no effect, and numbers are short."""

from __future__ import annotations

import pytest

from deploy.printing import counted, duration, printable, rough_duration, sparkline


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred", "\\u001b[31mred"),
        ("back\x08\rspace", "back\\u0008\\u000dspace"),
        ("\x9b2J", "\\u009b2J"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("größe 数 ✓", "größe 数 ✓"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([float("nan")], ""),
        ([3.0], "▁"),
        ([0, 7], "▁█"),
        ([5, 5, 5], "▁▁▁"),
        ([0, float("nan"), 7], "▁█"),
        (range(8), "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_a_long_sparkline_is_averaged() -> None:
    assert sparkline([0, 2, 4, 6, 6, 8, 13, 15], width=2) == "▁█"
    assert len(sparkline(range(1000), width=24)) == 24


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (10, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (185, "3 min"), (7620, "2 h"), (900000, "10 d")]
)
def test_rough_duration(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


def test_counted() -> None:
    assert counted(1, "grader") == "1 grader"
    assert counted(2, "grader") == "2 graders"
