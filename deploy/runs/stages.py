"""Stages of a run: the table of their display names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Display names of a stage."""

    name: str
    """Name of the stage, and of the policy at its end."""
    when: str
    """Time of the evaluation at its end."""
    unit: str = "steps"
    """Unit of its work."""
    line: str = "-"
    """Line style in plots, as Matplotlib's."""


STAGES: Mapping[str, Stage] = {
    "untrained": Stage(name="untrained", when="before training"),
    "start": Stage(name="start", when="at the start"),
    "sft": Stage(name="SFT", when="after SFT", line=":"),
    "rl": Stage(name="RL", when="after RL", unit="rounds"),
    "control": Stage(name="control", when="after the control", line="--"),
}
"""The stages in order, by the label of the evaluation at their end: `actors.spec.Phase`, and `start`.

`start` is the checkpoint that a run without SFT begins with.
"""
