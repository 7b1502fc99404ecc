"""State of the rows that are denoised together, as flat tensors: row s is slot s of the engine.

A canvas is a prompt, its completion slots, then padding. Each row has its own prompt length, block pointer and
schedule, so that rows at different positions of different requests share one forward.

Shape letters: S slots of the engine, W columns of the widest canvas, F rows that enter or leave, A selected rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.batch import to_device_async
from learner.counter import fold_tensor
from learner.model.config import TransformerConfig
from rollout.canvas import Canvas
from rollout.request import Cache, Committed, Completion, FinishReason, Progress, Request, canvas_of
from rollout.schedules import CODES, RowSchedules, even_share

_NO_TOKEN = -1
# The dtype of a field's tensor.
_INT64, _BOOL, _FLOAT32 = ({"dtype": dtype} for dtype in (torch.int64, torch.bool, torch.float32))


@dataclass(slots=True)
class RowState:
    """State of the rows: one number per row, [S], or [A] for a selection of rows."""

    prompt_length: Tensor = field(metadata=_INT64)
    """Column where the completion begins."""
    end: Tensor = field(metadata=_INT64)
    """Column after the completion's last slot."""
    block_length: Tensor = field(metadata=_INT64)
    steps_per_block: Tensor = field(metadata=_INT64)
    quota_is_minimum: Tensor = field(metadata=_BOOL)
    """With `threshold`: whether a step commits at least its even share, instead of at least one slot."""
    block_start: Tensor = field(metadata=_INT64)
    """Column where the current block begins."""
    block_masked: Tensor = field(metadata=_INT64)
    """Slots of the block that are divided over its steps: those masked when it began. In a block-causal policy: all
    of its slots, given tokens included."""
    step: Tensor = field(metadata=_INT64)
    """Denoise steps done."""
    step_in_block: Tensor = field(metadata=_INT64)
    """Denoise steps done in the current block."""
    edits: Tensor = field(metadata=_BOOL)
    """Whether the row uses token editing: its blocks are finished once `is_editing` is false, not once unmasked."""
    is_editing: Tensor = field(metadata=_BOOL)
    max_post_steps: Tensor = field(metadata=_INT64)
    num_post_steps: Tensor = field(metadata=_INT64)
    """Steps of the current block that began with no masked slot."""
    num_idle_steps: Tensor = field(metadata=_INT64)
    """Steps, over all blocks, that wrote nothing; `step` does not count them."""
    draw_key: Tensor = field(metadata=_INT64)
    """Key of the draws of the coming step."""
    steps_per_level: Tensor = field(metadata=_INT64)
    """Steps that share a draw key, in a rollout tree."""
    done: Tensor = field(metadata=_BOOL)
    """Whether the row is finished; an empty slot is done too."""
    not_finite: Tensor = field(metadata=_BOOL)
    """Whether a prediction for the row was not finite."""
    code: Tensor = field(metadata=_INT64)
    """`CODES` of the schedule."""
    temperature: Tensor = field(metadata=_FLOAT32)
    top_p: Tensor = field(metadata=_FLOAT32)
    top_k: Tensor = field(metadata=_INT64)
    log_threshold: Tensor = field(metadata=_FLOAT32)
    factor: Tensor = field(metadata=_FLOAT32)
    entropy_bound: Tensor = field(metadata=_FLOAT32)
    cfg_scale: Tensor = field(metadata=_FLOAT32)
    log_editing_threshold: Tensor = field(metadata=_FLOAT32)

    def of(self, rows_A: Tensor) -> RowState:
        """Copy the state of some rows."""
        return RowState(*(getattr(self, column.name)[rows_A] for column in fields(self)))

    def schedules(self) -> RowSchedules:
        """Return the rows' schedules, as `select` takes them."""
        return RowSchedules(
            code=self.code,
            quota=(quota := even_share(self.block_masked, self.steps_per_block, self.step_in_block)),
            minimum=torch.where(self.quota_is_minimum, quota, 1),
            log_threshold=self.log_threshold,
            factor=self.factor,
            entropy_bound=self.entropy_bound,
        )


@dataclass(slots=True)
class Canvases:
    """Canvases of the rows: one number per row and column, [S, W]."""

    tokens: Tensor = field(metadata=_INT64)
    masked: Tensor = field(metadata=_BOOL)
    """Completion slots that are not committed yet."""
    step_map: Tensor = field(metadata=_INT64)
    """This and the next five: as in `Completion`."""
    logp: Tensor = field(metadata=_FLOAT32)
    logp_raw: Tensor = field(metadata=_FLOAT32)
    entropy: Tensor = field(metadata=_FLOAT32)
    distribution_entropy: Tensor = field(metadata=_FLOAT32)
    fallback: Tensor = field(metadata=_BOOL)


class BatchState:
    """Slots of the engine: S rows, each empty or denoising one request."""

    def __init__(self, num_slots: int, config: TransformerConfig, device: torch.device) -> None:
        """Make empty slots for a policy of this shape."""
        self.num_slots, self._config, self.device = num_slots, config, device
        self.width = self._longest = self._longest_block = 0
        self.rows = RowState(**_zeros(RowState, num_slots, device=device))
        self.rows.done.fill_(True)
        # Set once a row uses token editing: without one, a step launches no extra GPU work.
        self._has_edits = False
        self.canvases = self._empty_canvases(0)
        self._multipliers_W = torch.empty(0, dtype=torch.int64, device=device)
        self._stop_ids = torch.full((num_slots, 1), _NO_TOKEN, device=device)
        # A column for each level of the deepest rollout tree so far; without one, a step launches no extra GPU work.
        self._draw_keys = torch.zeros((num_slots, 1), dtype=torch.int64, device=device)

    def admit(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Put requests into empty slots."""
        self._has_edits |= any(request.params.edits for request in requests)
        for request in requests:
            self._longest_block = max(self._longest_block, request.params.block_length)
            self._longest = max(self._longest, canvas_of(request, self._config).end)
        # Every block is read through a window as wide as the longest block of any row, so the canvases need as many
        # columns past the end of the longest one.
        self._widen(self._longest + self._longest_block)
        rows_F = on_device(slots, self.device)
        tokens = np.full((len(requests), self.width), self._config.mask_token_id, dtype=np.int64)
        masked = np.zeros((len(requests), self.width), dtype=bool)
        for row, request in enumerate(requests):
            start = len(request.prompt_ids)
            tokens[row, :start] = request.prompt_ids
            masked[row, start : canvas_of(request, self._config).end] = True
            for slot, token in request.fixed_tokens.items():
                tokens[row, start + slot], masked[row, start + slot] = token, False
        for column in fields(Canvases):
            getattr(self.canvases, column.name)[rows_F] = 0
        self.canvases.step_map[rows_F] = -1
        self.canvases.tokens[rows_F] = on_device(tokens, self.device)
        self.canvases.masked[rows_F] = on_device(masked, self.device)
        for slot, request in zip(slots, requests, strict=True):
            if request.committed is not None:
                self._restore(slot, len(request.prompt_ids), request.committed)
        self._admit_rows(rows_F, requests)
        self._admit_stop_ids(rows_F, requests)
        self._admit_draw_keys(rows_F, requests)
        self._advance_blocks(rows_F)

    def advance(self, rows_A: Tensor, before: RowState, masked_AK: Tensor, written_AK: Tensor) -> None:
        """Count a denoise step, and move rows whose block is finished to their next block.

        A row is done when no slot is masked, or when a finished block has a stop token: later text would be cut off.
        Under token editing a block is finished when a step wrote nothing, or after `max_post_steps` steps that began
        with no masked slot.

        Args:
            rows_A: the slots of the engine.
            before: the state of their rows before the step.
            masked_AK: bool, which slots of their blocks were masked before it.
            written_AK: bool, which slots it wrote.
        """
        going_A = (~before.done).long()
        self.rows.step_in_block[rows_A] = before.step_in_block + going_A
        if self._has_edits:
            going_A = self._finish_edited_blocks(rows_A, before, masked_AK.any(dim=1), written_AK.any(dim=1))
        self.rows.step[rows_A] = before.step + going_A
        if self._draw_keys.shape[1] > 1:
            self._set_draw_keys(rows_A)
        self._advance_blocks(rows_A)

    def _finish_edited_blocks(self, rows_A: Tensor, before: RowState, had_mask_A: Tensor, wrote_A: Tensor) -> Tensor:
        """Mark blocks that are finished under token editing. Returns [A]: 1 where the step wrote something."""
        is_going_A = ~before.done
        num_post_A = before.num_post_steps + (is_going_A & ~had_mask_A)
        self.rows.num_post_steps[rows_A] = num_post_A
        self.rows.num_idle_steps[rows_A] = before.num_idle_steps + (is_going_A & ~wrote_A)
        self.rows.is_editing[rows_A] = before.is_editing & wrote_A & (num_post_A < before.max_post_steps)
        return (is_going_A & wrote_A).long()

    def harvest(
        self, slots: Sequence[int], requests: Sequence[Request], policy_version: int, *, is_cache_exact: bool
    ) -> list[Completion]:
        """Return the completions of finished rows; their slots can then be reused."""
        rows_F = on_device(slots, self.device)
        stop_F = self._first_stop(rows_F)
        num_steps_F = self.rows.step[rows_F] + self.rows.num_idle_steps[rows_F]
        (last_F, num_steps), host = self._on_host(rows_F, stop_F, num_steps_F)
        return [
            Completion(
                **_record(
                    {name: array[row] for name, array in host.items()},
                    request,
                    canvas_of(request, self._config),
                    *ends,
                ),
                exact=is_cache_exact or request.params.cache is Cache.NONE,
                logp_exact=request.params.logp_exact,
                policy_version=policy_version,
            )
            for row, (request, *ends) in enumerate(zip(requests, last_F, num_steps, strict=True))
        ]

    def clear(self, slot: int) -> None:
        """Empty a slot, whether its row is finished or not."""
        self.rows.done[slot] = True

    def progress(self, slots: Sequence[int], requests: Sequence[Request], num_committed: list[int]) -> list[Progress]:
        """Return the progress of the rows in some slots. Synchronizes with the device.

        `num_committed` is as in `Progress`.
        """
        rows_A = on_device(slots, self.device)
        (num_steps,), host = self._on_host(rows_A, self.rows.step[rows_A])
        found = []
        for row, request in enumerate(requests):
            start = len(request.prompt_ids)
            end = canvas_of(request, self._config).end
            kept = {name: array[row, start:end] for name, array in host.items()}
            found.append(
                Progress(
                    num_steps=num_steps[row],
                    num_committed=num_committed[row],
                    masked=kept["masked"].astype(bool),
                    slots=Committed(**_columns(kept)),
                )
            )
        return found

    def _on_host(self, rows_A: Tensor, *numbers_A: Tensor) -> tuple[list[list[int]], dict[str, NDArray[Any]]]:
        """Copy numbers of rows, and their canvases by the fields of `Canvases`, to the host in one synchronization."""
        canvases = {column.name: getattr(self.canvases, column.name)[rows_A] for column in fields(Canvases)}
        bits = [part.view(torch.int32) if part.is_floating_point() else part.int() for part in canvases.values()]
        packed_A = torch.cat((torch.stack(numbers_A, dim=1).int(), *bits), dim=1).cpu().numpy()
        numbers, *parts = np.split(packed_A, range(len(numbers_A), packed_A.shape[1], self.width), axis=1)
        host = {
            column.name: part.view(np.float32) if column.metadata["dtype"] is torch.float32 else part
            for column, part in zip(fields(Canvases), parts, strict=True)
        }
        return numbers.T.tolist(), host

    def equal_canvases(self, rows_A: Tensor) -> Tensor:
        """Return, for each of some slots, the first of them with the same canvas tokens, possibly itself.

        No false matches, and no synchronization with the device: hashes only choose which two canvases are compared.
        """
        tokens_AW = self.canvases.tokens[rows_A]
        hash_A = (tokens_AW * self._multipliers_W).sum(dim=1)
        ordered_A, place_A = hash_A.sort(stable=True)
        is_new_A = torch.ones_like(ordered_A, dtype=torch.bool)
        is_new_A[1:] = ordered_A[1:] != ordered_A[:-1]
        places_A = torch.arange(len(rows_A), device=self.device)
        first_A = torch.empty_like(place_A)
        first_A[place_A] = place_A[torch.where(is_new_A, places_A, 0).cummax(dim=0).values]
        is_equal_A = (tokens_AW == tokens_AW[first_A]).all(dim=1)
        return rows_A[torch.where(is_equal_A, first_A, places_A)]

    def _restore(self, slot: int, start: int, committed: Committed) -> None:
        """Restore slots that were committed before an interruption."""
        span = slice(start, start + len(committed))
        for column, values in (
            (self.canvases.tokens, committed.token_ids),
            (self.canvases.step_map, committed.step_map),
            (self.canvases.logp, committed.commit_logp),
            (self.canvases.logp_raw, committed.commit_logp_raw),
            (self.canvases.entropy, committed.commit_entropy),
            (self.canvases.distribution_entropy, committed.commit_law_entropy),
            (self.canvases.fallback, committed.fallback),
            (self.canvases.masked, np.zeros(len(committed), dtype=bool)),
        ):
            column[slot, span] = on_device(values, self.device, column.dtype)

    def _admit_rows(self, rows_F: Tensor, requests: Sequence[Request]) -> None:
        values = [_row_values(request) for request in requests]
        for dtype in (torch.int64, torch.bool, torch.float32):
            names = [column.name for column in fields(RowState) if column.metadata["dtype"] is dtype]
            uploaded = on_device([[row[name] for row in values] for name in names], self.device, dtype)
            for name, of_rows_F in zip(names, uploaded.unbind(), strict=True):
                getattr(self.rows, name)[rows_F] = of_rows_F

    def _admit_stop_ids(self, rows_F: Tensor, requests: Sequence[Request]) -> None:
        given = [request.params.stop_ids for request in requests]
        stop_ids = [self._config.stop_ids if ids is None else tuple(dict.fromkeys(ids)) for ids in given]
        width = max(self._stop_ids.shape[1], *map(len, stop_ids))
        if width > self._stop_ids.shape[1]:
            wider = torch.full((self.num_slots, width), _NO_TOKEN, device=self.device)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        padded = [[*ids, *[_NO_TOKEN] * (width - len(ids))] for ids in stop_ids]
        self._stop_ids[rows_F] = on_device(padded, self.device)

    def _admit_draw_keys(self, rows_F: Tensor, requests: Sequence[Request]) -> None:
        given = [request.draw_keys for request in requests]
        more = max(map(len, given)) - self._draw_keys.shape[1]
        if more > 0:
            self._draw_keys = torch.cat((self._draw_keys, self._draw_keys[:, -1:].expand(-1, more)), dim=1)
        width = self._draw_keys.shape[1]
        padded = [[*keys, *[keys[-1]] * (width - len(keys))] for keys in given]
        self._draw_keys[rows_F] = on_device(padded, self.device)
        self._set_draw_keys(rows_F)

    def _set_draw_keys(self, rows_A: Tensor) -> None:
        """Set the draw key of each row to that of the level that its next step belongs to."""
        level_A = self.rows.step[rows_A] // self.rows.steps_per_level[rows_A]
        self.rows.draw_key[rows_A] = self._draw_keys[rows_A, level_A.clamp(max=self._draw_keys.shape[1] - 1)]

    def _advance_blocks(self, rows_A: Tensor) -> None:
        """Move each row to its first unfinished block, and mark the rows that are done."""
        rows, masked_AW = self.rows, self.canvases.masked[rows_A]
        begun_A, length_A = rows.block_start[rows_A], rows.block_length[rows_A]
        columns_W = torch.arange(self.width, device=self.device)
        first_A = torch.where(masked_AW, columns_W, self.width).amin(dim=1)
        # A block-causal policy's blocks are counted from the first column.
        origin_A = torch.zeros_like(begun_A) if self._config.is_block_causal else rows.prompt_length[rows_A]
        block_A = (first_A - origin_A).div(length_A, rounding_mode="floor")
        start_A = origin_A + block_A * length_A
        is_last_A = first_A == self.width
        if self._has_edits:
            is_editing_A = rows.is_editing[rows_A]
            start_A = torch.where(is_editing_A, begun_A, start_A)
            is_last_A &= ~is_editing_A
        # A stop token that was given in a later block does not end the text yet.
        done_A = rows.done[rows_A] | is_last_A | (self._first_stop(rows_A) < start_A)
        is_new_A = (start_A > begun_A) & ~done_A
        in_block_AW = (columns_W >= start_A[:, None]) & (columns_W < (start_A + length_A)[:, None])
        num_shared_A = length_A if self._config.is_block_causal else (masked_AW & in_block_AW).sum(dim=1)
        rows.done[rows_A] = done_A
        rows.block_start[rows_A] = torch.where(is_new_A, start_A, begun_A)
        rows.block_masked[rows_A] = torch.where(is_new_A, num_shared_A, rows.block_masked[rows_A])
        rows.step_in_block[rows_A] = torch.where(is_new_A, 0, rows.step_in_block[rows_A])
        if self._has_edits:
            rows.num_post_steps[rows_A] = torch.where(is_new_A, 0, rows.num_post_steps[rows_A])
            rows.is_editing[rows_A] = torch.where(is_new_A, rows.edits[rows_A], is_editing_A)

    def _first_stop(self, rows_A: Tensor) -> Tensor:
        """Return the column [A] of each row's first committed stop token, W where there is none."""
        start_A, end_A = self.rows.prompt_length[rows_A], self.rows.end[rows_A]
        tokens_AW = self.canvases.tokens[rows_A]
        columns_W = torch.arange(self.width, device=self.device)
        is_text_AW = (columns_W >= start_A[:, None]) & (columns_W < end_A[:, None])
        is_stop_AW = (tokens_AW[:, :, None] == self._stop_ids[rows_A][:, None, :]).any(dim=2)
        is_stop_AW &= is_text_AW & ~self.canvases.masked[rows_A]
        return torch.where(is_stop_AW, columns_W, self.width).amin(dim=1)

    def _empty_canvases(self, width: int) -> Canvases:
        return Canvases(**_zeros(Canvases, self.num_slots, width, device=self.device))

    def _widen(self, width: int) -> None:
        if width <= self.width:
            return
        wider = self._empty_canvases(width)
        for column in fields(Canvases):
            getattr(wider, column.name)[:, : self.width] = getattr(self.canvases, column.name)
        self.canvases, self.width = wider, width
        columns_W = torch.arange(width, device=self.device)
        self._multipliers_W = fold_tensor(torch.zeros_like(columns_W), columns_W)


def _zeros(kind: type[RowState | Canvases], *shape: int, device: torch.device) -> dict[str, Tensor]:
    """Return zero tensors for the fields of `kind`."""
    return {column.name: torch.zeros(shape, dtype=column.metadata["dtype"], device=device) for column in fields(kind)}


def on_device(values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `values` as a tensor on the device. The copy to a GPU is asynchronous."""
    return to_device_async(torch.tensor(values, dtype=dtype), device)


def _row_values(request: Request) -> dict[str, float]:
    """Return the initial state of a row, by the fields of `RowState`; `_advance_blocks` then sets its block."""
    params, start = request.params, len(request.prompt_ids)
    return {
        "prompt_length": start,
        "end": start + params.gen_length,
        "block_length": params.block_length,
        "steps_per_block": params.num_block_steps,
        "quota_is_minimum": params.steps_per_block is not None,
        "block_start": -1,
        "block_masked": 0,
        "step": 0 if request.committed is None else request.committed.num_steps,
        "step_in_block": 0,
        "edits": params.edits,
        "is_editing": False,
        "max_post_steps": params.max_post_steps,
        "num_post_steps": 0,
        "num_idle_steps": 0,
        "draw_key": request.draw_keys[0],
        "steps_per_level": request.steps_per_level,
        "done": False,
        "not_finite": False,
        "code": CODES[params.schedule],
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "log_threshold": _log(params.threshold),
        "factor": math.nan if params.factor is None else params.factor,
        "entropy_bound": math.nan if params.entropy_bound is None else params.entropy_bound,
        "cfg_scale": params.cfg_scale,
        "log_editing_threshold": _log(params.editing_threshold),
    }


def _log(threshold: float | None) -> float:
    if threshold is None:
        return math.nan
    return math.log(threshold) if threshold else -math.inf


def _record(
    columns: dict[str, np.ndarray], request: Request, canvas: Canvas, first_stop: int, num_steps: int
) -> dict[str, Any]:
    """Return fields of `Completion` from a row's canvas: whole blocks up to that of the first stop token."""
    params, start = request.params, len(request.prompt_ids)
    is_ended = first_stop < start + params.gen_length
    num_tokens = first_stop - start + 1 if is_ended else params.gen_length
    end = canvas.block_end(start + num_tokens - 1)
    return {
        **_columns({name: column[start:end] for name, column in columns.items()}),
        "num_tokens": num_tokens,
        "num_forwards": num_steps * (2 if params.cfg_scale else 1),
        "finish_reason": FinishReason.EOS if is_ended else FinishReason.LENGTH,
    }


def _columns(kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copy some slots of a canvas, by the fields that `Committed` and `Completion` share."""
    return {
        "token_ids": kept["tokens"].astype(np.int32),
        "step_map": kept["step_map"].astype(np.int32),
        "commit_logp": kept["logp"].copy(),
        "commit_logp_raw": kept["logp_raw"].copy(),
        "commit_entropy": kept["entropy"].copy(),
        "commit_law_entropy": kept["distribution_entropy"].copy(),
        "fallback": kept["fallback"].astype(bool),
    }
