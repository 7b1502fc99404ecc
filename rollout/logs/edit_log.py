"""Log of token editing: every write of every step, kept until its row leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.request import Writes
from rollout.step import CommittedTokens


@dataclass(frozen=True, slots=True)
class _StepEdits:
    """Candidate writes of a step, with a flag for those that were made, as tensors on the device."""

    rows: set[int]
    """Slots of the engine whose writes have not been taken yet."""
    numbers: Tensor
    """[5, M] int64: slot of the engine, whether it was written, denoise step, completion slot, token."""
    logps: Tensor
    """[2, M] float32 log-probabilities: under the sampling distribution, and at temperature 1."""


class EditLog:
    """Writes of the rows that use token editing. Only `take` synchronizes with the device."""

    def __init__(self) -> None:
        """Begin empty."""
        self._steps: list[_StepEdits] = []

    def add(
        self, rows: Iterable[int], engine_slots_M: Tensor, slots_M: Tensor, sampled: CommittedTokens, chosen_M: Tensor
    ) -> None:
        """Add a step.

        Args:
            rows: the slots of the engine whose rows use token editing.
            engine_slots_M: the slot of the engine of each candidate write.
            slots_M: its completion slot.
            sampled: its token.
            chosen_M: bool, whether it is written.
        """
        numbers = torch.stack((engine_slots_M, chosen_M.long(), sampled.steps, slots_M, sampled.tokens))
        self._steps.append(_StepEdits(set(rows), numbers, torch.stack((sampled.logp, sampled.logp_raw))))

    def take(self, row: int) -> Writes:
        """Return all writes of one row, and drop them here."""
        steps = [step for step in self._steps if row in step.rows]
        self.forget(row)
        if not steps:
            return Writes.none()
        numbers = torch.cat([step.numbers for step in steps], dim=1).cpu().numpy()
        logps = torch.cat([step.logps for step in steps], dim=1).cpu().numpy()
        is_own = (numbers[0] == row) & (numbers[1] == 1)
        step_map, slots, tokens = numbers[2:, is_own].astype(np.int32)
        return Writes(steps=step_map, slots=slots, token_ids=tokens, logp=logps[0, is_own], logp_raw=logps[1, is_own])

    def forget(self, row: int) -> None:
        """Drop the writes of one row."""
        for step in self._steps:
            step.rows.discard(row)
        self._steps = [step for step in self._steps if step.rows]
