"""Step answers: completions of the states that a row goes through, each in one step, kept until the row leaves.

The answer of a state has the committed tokens, and in each masked slot of the canvas the most probable token, or the
one that the step sampled. A step then predicts the slots of later blocks too, and not only those of its own.

Shape letters: A active rows, K slots of the longest block, J slots from a block's first to the canvas's last, W columns
of the widest canvas, N open slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.batch_state import Canvases, RowState, on_device
from rollout.forwards import SlotLogits
from rollout.request import Completion, FinishReason, Request, StepAnswers
from rollout.step import BlockSlots, sample_slots
from rollout.token_sampling import predictions


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasSlots:
    """The slots of each row from its block's first to the canvas's last, [A, J]; the block's are the first K."""

    columns: Tensor
    """Their columns in the canvas; after a canvas's end, those of padding."""
    masked: Tensor
    """bool: masked slots."""
    open: Tensor
    """bool: masked slots, and those of the block that may be written."""

    @classmethod
    def of(cls, block: BlockSlots, canvases: Canvases, rows_A: Tensor, num_slots: int) -> CanvasSlots:
        """Return the J = `num_slots` slots that begin with the block's."""
        places_J = torch.arange(num_slots, device=rows_A.device)
        columns_AJ = (block.columns[:, :1] + places_J).clamp(max=canvases.masked.shape[1] - 1)
        masked_AJ = canvases.masked[rows_A[:, None], columns_AJ]
        open_AJ = masked_AJ.clone()
        open_AJ[:, : block.open.shape[1]] |= block.open
        return cls(columns=columns_AJ, masked=masked_AJ, open=open_AJ)

    def answers(self, found: SlotLogits, tokens_AW: Tensor, requests: Sequence[Request], rows: RowState) -> Tensor:
        """Return canvases whose masked slots have their answer's token, [A, W]: the most probable one, or a sample.

        Args:
            found: logits of the open slots, or of all.
            tokens_AW: the current canvases.
            requests: the request of each row, which says what its answers have.
            rows: state of each row.
        """
        rows_N, columns_N = found.index // self.columns.shape[1], self.columns.flatten()[found.index]
        if all(request.samples_step_answers for request in requests):
            answer_N = self._sampled(found, requests, rows)
        else:
            answer_N = found.logits.argmax(dim=-1)[found.source]
            if any(request.samples_step_answers for request in requests):
                samples_A = on_device([request.samples_step_answers for request in requests], rows_N.device)
                answer_N = torch.where(samples_A[rows_N], self._sampled(found, requests, rows), answer_N)
        is_masked_N = self.masked.flatten()[found.index]
        answers_AW = tokens_AW.clone()
        answers_AW[rows_N, columns_N] = torch.where(is_masked_N, answer_N, answers_AW[rows_N, columns_N])
        return answers_AW

    def _sampled(self, found: SlotLogits, requests: Sequence[Request], rows: RowState) -> Tensor:
        """Return what the step samples in each slot of `found`, [N], whether or not it commits it."""
        params, tokens = [request.params for request in requests], []
        # The step needs the logits after this: a part of them is copied at a time, as much as a block has.
        num_block_slots = len(requests) * max(one.block_length for one in params)
        for index_M, source_M in zip(
            found.index.split(num_block_slots), found.source.split(num_block_slots), strict=True
        ):
            row_M = index_M // self.columns.shape[1]
            slots_M = self.columns.flatten()[index_M] - rows.prompt_length[row_M]
            every_M = torch.arange(len(source_M), device=source_M.device)
            predicted = predictions(found.logits[source_M])
            tokens.append(sample_slots(predicted, every_M, params, rows, row_M=row_M, slots_M=slots_M).tokens)
        return torch.cat(tokens)

    def of_block(self, found: SlotLogits, block: BlockSlots, *, is_static: bool) -> SlotLogits:
        """Return what `found` has of the first K slots; with `is_static` it has all, and nothing synchronizes."""
        (A, J), K = self.columns.shape, block.columns.shape[1]
        if is_static:
            rows_A1 = torch.arange(A, device=found.index.device)[:, None]
            kept_N = (rows_A1 * J + torch.arange(K, device=found.index.device)).flatten()
        else:
            kept_N = (found.index % J < K).nonzero()[:, 0]
        index_N = found.index[kept_N]
        logits_UV, source_N = found.logits, found.source[kept_N]
        if len(logits_UV) == len(found.index):
            # No rows share a forward: the logits of later blocks can be freed.
            logits_UV, source_N = logits_UV[kept_N], torch.arange(len(kept_N), device=kept_N.device)
        return SlotLogits(logits_UV, index_N // J * K + index_N % J, source_N)


@dataclass(frozen=True, slots=True)
class _StepStates:
    """The answers of a step, on the device."""

    places: dict[int, int]
    """The place in the step of each slot of the engine whose answers have not been taken yet."""
    tokens: Tensor
    """[A, W] int32: canvases."""


class StepAnswerLog:
    """Answers of the rows that ask for them. Only `take` synchronizes with the device."""

    def __init__(self) -> None:
        """Begin empty."""
        self._states: list[_StepStates] = []

    def add(self, places: dict[int, int], answers_AW: Tensor) -> None:
        """Add a step; `places` are those of the slots of the engine whose requests ask for answers."""
        self._states.append(_StepStates(places, answers_AW.int()))

    def take(self, row: int, request: Request, completion: Completion, stop_ids: Sequence[int]) -> StepAnswers:
        """Return the answers of a finished row that its request asks for, and drop all of its here."""
        # A row takes a step in each forward until it is finished.
        states = [state.tokens[state.places[row]] for state in self._states if row in state.places]
        self.forget(row)
        start, length = len(request.prompt_ids), request.params.gen_length
        steps = steps_of_highest_entropy(completion, request.num_step_answers)
        chosen = [states[step][start : start + length] for step in steps]
        token_ids = torch.stack(chosen).cpu().numpy() if chosen else np.zeros((0, length), dtype=np.int32)
        is_stop = np.isin(token_ids, np.array(stop_ids))
        is_ended: NDArray[np.bool_] = np.any(is_stop, axis=1)
        return StepAnswers(
            steps=np.array(steps, dtype=np.int32),
            token_ids=token_ids,
            num_tokens=np.where(is_ended, is_stop.argmax(axis=1) + 1, length).astype(np.int32),
            ended=is_ended,
        )

    def forget(self, row: int) -> None:
        """Drop the answers of one row."""
        for state in self._states:
            state.places.pop(row, None)
        self._states = [state for state in self._states if state.places]


def steps_of_highest_entropy(completion: Completion, count: int) -> list[int]:
    """Return the `count` denoise steps whose tokens have the highest mean entropy, or all, the highest first.

    Only those up to the last that commits anything but an end of text, as the learner trains them (the estimator
    `trajectory` with `proposal: top_entropy` and `slots: denoised`).
    """
    step_map, is_said = completion.step_map, completion.step_map >= 0
    if completion.finish_reason is FinishReason.EOS:
        is_said &= completion.token_ids != completion.token_ids[completion.num_tokens - 1]
    is_covered = (step_map >= 0) & (step_map <= step_map[is_said].max(initial=-1))
    sums = np.bincount(step_map[is_covered], completion.commit_entropy[is_covered])
    means = sums / np.bincount(step_map[is_covered])
    ranked: list[int] = np.argsort(-means, kind="stable").tolist()
    return ranked[:count]
