"""Configuration of rollout trees: their nodes, and a recipe's section `learner.consistency`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

_MIN_TEMPERATURE = 1e-6


def inner_nodes(branches: Sequence[int], leaf: int) -> list[int]:
    """Return the inner nodes that a leaf descends from, one for each level but the last: its number in that level.

    Args:
        branches: the children of a node at each level; empty without a tree.
        leaf: the number of the leaf, from left to right.
    """
    return [leaf // math.prod(branches[level:]) for level in range(1, len(branches))]


class ConsistencyConfig(BaseModel):
    """Self-distillation towards the better siblings of a rollout tree (d-TreeRPO, arXiv 2512.09675).

    The prediction of a canvas is trained towards the tokens of its children with a positive advantage, weighted by the
    softmax of their advantages over a temperature. Both are functions of p, the share of `num_rounds` that is done.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    max_coef: NonNegativeFloat = 3e-3
    """Weight of the loss at the end; 0 is off. At p it is this times (e^(growth p) - 1) / (e^growth - 1)."""
    growth: Annotated[PositiveFloat, Field(le=100)] = 2.0
    """Curvature of the weight's growth: near 0 it is linear, and larger values put the increase later."""
    max_temperature: PositiveFloat = 2.0
    """Temperature at the start. At p it is this times (1 - p)^cooling, so that the best child prevails in the end."""
    cooling: NonNegativeFloat = 0.7
    """Exponent of the temperature's decay: 0 keeps it constant, and larger values lower it earlier."""

    def coef_at(self, progress: float) -> float:
        """Return the weight of the loss at a share of the rounds; 0 at the start."""
        return self.max_coef * math.expm1(self.growth * progress) / math.expm1(self.growth)

    def temperature_at(self, progress: float) -> float:
        """Return the temperature at a share of the rounds."""
        return max(self.max_temperature * (1.0 - progress) ** self.cooling, _MIN_TEMPERATURE)
