"""Forwards of one denoise step: KV caches, classifier-free guidance, sharing by equal canvases.

Rows of several kinds can be active at once. A row without a KV cache is run whole, once for all rows whose canvases are
equal. Under guidance it is run once more with its prompt masked. A row with a cache is run whole where its block begins
or is refreshed, which fills the cache. Other steps run only its block (dual), or its block and all after it (prefix).

A block-causal policy's blocks never change once they are finished, and no slot attends past its own block. So a canvas
is run up to its current block only. The KV cache of finished blocks is exact if it is computed after they are finished.
Therefore the first step of a block also runs the finished block before it (for a row that enters, its prompt). Every
other step runs only its block, and the column before it where that predicts its first slot.

Shape letters: A active rows, K slots of a block, R rows of a forward, U different canvases, N open slots, Q queried
columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from learner.batch import to_device_async
from learner.model.attention.rows import RaggedRows
from learner.model.kv_cache import KeysValues, KVCache
from learner.model.transformer import Transformer
from rollout.batch_state import BatchState, on_device
from rollout.request import Cache, Request

_BUCKET = 64


class ForwardKind(IntEnum):
    """Kind of forward that a row needs; active rows are sorted by it."""

    UNCACHED = 0
    REFRESH = 1
    CACHED = 2
    PREFILL = 3
    """Block-causal: the first step of a row, from its first column on."""
    COMMIT = 4
    """Block-causal: the first step of a later block, together with the block finished before it."""
    BLOCK = 5
    """Block-causal: any other step."""

    @property
    def caches_finished(self) -> bool:
        """Whether the KV cache that it fills for finished blocks is final."""
        return self >= ForwardKind.PREFILL


@dataclass(frozen=True, slots=True)
class ActiveRow:
    """A row of this step, as known on the host."""

    slot: int
    request: Request
    kind: ForwardKind
    first_equal_slot: int
    """The first slot whose canvas has the same tokens, possibly its own."""
    block_start: int
    """Column where its block begins."""
    length: int
    """Columns of the canvas that the block can attend to."""
    num_cached: int = 0
    """Columns in the final KV cache, where the policy is block-causal."""

    @property
    def canvas_key(self) -> object:
        """Key that is equal for rows that share a forward: equal tokens, masked slots, blocks and guidance."""
        params = self.request.params
        return (
            self.first_equal_slot,
            len(self.request.prompt_ids),
            params.gen_length,
            params.block_length,
            params.cfg_scale,
            params.forbidden_ids,
            # The ids that may end a text affect which tokens a grammar allows.
            None if self.request.grammar is None else (self.request.grammar, params.stop_ids),
            # Under token editing a block without masks may be unfinished, and its tokens, except given ones, are
            # predicted.
            self.block_start,
            frozenset(self.request.fixed_tokens) if params.edits else None,
        )


@dataclass(slots=True)
class ForwardCounts:
    """Counters of the cost of forwards."""

    num_forwards: int = 0
    """Calls of the network."""
    num_rows: int = 0
    """Canvases, whole or in part, that they ran."""
    num_tokens: int = 0
    """Slots that they ran, padding included."""


@dataclass(frozen=True, slots=True)
class SlotLogits:
    """Logits of the open slots of a step."""

    logits: Tensor
    """[U, V]."""
    index: Tensor
    """[N] int64, ascending: the open slots (static: all slots of the blocks) as indices into [A * K]."""
    source: Tensor
    """[N] int64: the row of `logits` that serves each of them; rows that share a forward share it."""


class Forwards:
    """Runs the policy for the rows of a batch."""

    def __init__(
        self,
        model: Transformer,
        forward: Callable[..., Tensor],
        state: BatchState,
        counts: ForwardCounts,
        *,
        kv_cache: list[KeysValues] | None,
        is_static: bool,
        is_compiled: bool,
        concatenates_rows: bool = False,
    ) -> None:
        """Run `model` on canvases in `state`.

        Args:
            model: the policy.
            forward: its forward, possibly compiled.
            state: the rows.
            counts: counters to add to.
            kv_cache: the KV cache, passed from batch to batch; it grows as needed. None: a cache of this batch only.
            is_static: score every slot of each block instead of the masked ones, so that nothing synchronizes with the
                device, and round up the common width of unequal rows.
            is_compiled: round up every width, since each shape is compiled separately.
            concatenates_rows: run whole canvases of unequal length back to back where there is no KV cache. This needs
                neither padding nor its mask.
        """
        self.model, self._forward, self.counts = model, forward, counts
        self._state, self._is_static, self._is_compiled = state, is_static, is_compiled
        self._concatenates_rows = concatenates_rows
        self._kv_cache: list[KeysValues] = [] if kv_cache is None else kv_cache
        self._is_cache_kept = kv_cache is not None

    def logits(self, active: Sequence[ActiveRow], columns_AK: Tensor, open_AK: Tensor) -> SlotLogits:
        """Compute the logits of the open slots of all active rows, which are sorted by kind.

        Args:
            active: the rows.
            columns_AK: columns of their blocks.
            open_AK: bool, which of these may be written.
        """
        parts, first = [], 0
        for kind in ForwardKind:
            rows = [row for row in active if row.kind is kind]
            if rows:
                span = slice(first, first + len(rows))
                parts.append((first * columns_AK.shape[1], self._part(rows, columns_AK[span], open_AK[span])))
                first += len(rows)
        if len(parts) == 1:
            return parts[0][1]
        num_before = [0, *accumulate(len(part.logits) for _, part in parts)]
        return SlotLogits(
            logits=torch.cat([part.logits for _, part in parts]),
            index=torch.cat([part.index + offset for offset, part in parts]),
            source=torch.cat([part.source + before for before, (_, part) in zip(num_before, parts, strict=False)]),
        )

    def _part(self, rows: list[ActiveRow], columns_RK: Tensor, open_RK: Tensor) -> SlotLogits:
        """Compute the logits of rows of one kind."""
        index_N = self._scored_slots(open_RK)
        keys_R = [row.canvas_key for row in rows] if self._shares_canvases(rows[0].kind) else []
        first_of_key: dict[object, int] = {}
        for index, key in enumerate(keys_R):
            first_of_key.setdefault(key, index)
        if len(first_of_key) in (0, len(rows)):
            logits_NV = self._computed(rows, columns_RK, index_N)
            return SlotLogits(logits_NV, index_N, torch.arange(len(index_N), device=index_N.device))
        first = list(first_of_key.values())
        canvas_of_key = {key: canvas for canvas, key in enumerate(first_of_key)}
        canvas_of_row = [canvas_of_key[key] for key in keys_R]
        first_U = self._tensor(first)
        shared_M = self._scored_slots(open_RK[first_U])
        computed = [rows[index] for index in first]
        logits_MV = self._computed(computed, columns_RK[first_U], shared_M)
        if rows[0].kind is not ForwardKind.UNCACHED:
            self._copy_cache(rows, [computed[canvas] for canvas in canvas_of_row])
        K = columns_RK.shape[1]
        place = torch.empty(len(first) * K, dtype=torch.int64, device=index_N.device)
        place[shared_M] = torch.arange(len(shared_M), device=index_N.device)
        canvas_N = self._tensor(canvas_of_row)[index_N // K]
        return SlotLogits(logits_MV, index_N, place[canvas_N * K + index_N % K])

    def _shares_canvases(self, kind: ForwardKind) -> bool:
        """Whether rows with equal canvases share a forward, as the completions of a problem do in their first step.

        A forward that fills the KV cache is shared if it runs the canvas from its first column. Not when compiled: each
        number of rows is compiled separately.
        """
        if kind is ForwardKind.UNCACHED:
            return True
        return kind in (ForwardKind.REFRESH, ForwardKind.PREFILL) and not self._is_compiled

    def _computed(self, rows: Sequence[ActiveRow], columns_RK: Tensor, scored_N: Tensor) -> Tensor:
        """Compute the logits [N, V] of rows of one kind, each by itself."""
        if rows[0].kind is ForwardKind.UNCACHED:
            return self._uncached(rows, columns_RK, scored_N)
        return self._with_cache(rows, columns_RK, scored_N)

    def _copy_cache(self, rows: Sequence[ActiveRow], sources: Sequence[ActiveRow]) -> None:
        """Copy the cached keys and values of each source row to its row."""
        pairs = [(source, row) for source, row in zip(sources, rows, strict=True) if source is not row]
        width = max(source.length for source, _ in pairs)
        sources_C = self._tensor([source.slot for source, _ in pairs])
        rows_C = self._tensor([row.slot for _, row in pairs])
        for keys, values in self._kv_cache:
            keys[rows_C, :width] = keys[sources_C, :width]
            values[rows_C, :width] = values[sources_C, :width]

    def _scored_slots(self, open_RK: Tensor) -> Tensor:
        if self._is_static:
            return torch.arange(open_RK.numel(), device=open_RK.device)
        return open_RK.flatten().nonzero()[:, 0]

    def _uncached(self, rows: Sequence[ActiveRow], columns_RK: Tensor, scored_N: Tensor) -> Tensor:
        """Compute the logits [N, V] of whole canvases."""
        rows_R = self._tensor([row.slot for row in rows])
        lengths = [row.length for row in rows]
        width = self._width(lengths)
        ids_RL = self._state.canvases.tokens[rows_R, :width]
        guided = [index for index, row in enumerate(rows) if row.request.params.cfg_scale]
        if not guided:
            return self._run(rows, ids_RL, lengths, columns_RK, scored_N)
        guided_G = self._tensor(guided)
        unconditional_GL = self._without_prompt(rows_R[guided_G], width)
        unconditional_T, of_T = self._unconditional_slots(guided_G, columns_RK, scored_N)
        logits = self._run(
            [*rows, *(rows[index] for index in guided)],
            torch.cat((ids_RL, unconditional_GL)),
            [*lengths, *(lengths[index] for index in guided)],
            torch.cat((columns_RK, columns_RK[guided_G])),
            torch.cat((scored_N, unconditional_T)),
        )
        logits = logits.float()
        conditional_NV, unconditional_TV = logits[: len(scored_N)], logits[len(scored_N) :]
        scale_T = 1 + self._state.rows.cfg_scale[rows_R[scored_N[of_T] // columns_RK.shape[1]]]
        conditional_NV[of_T] = torch.lerp(unconditional_TV, conditional_NV[of_T], scale_T[:, None])
        return conditional_NV

    def _without_prompt(self, rows_G: Tensor, width: int) -> Tensor:
        """Return the canvases [G, width] of some rows with their prompts masked."""
        columns = torch.arange(width, device=rows_G.device)
        is_prompt_GL = columns < self._state.rows.prompt_length[rows_G, None]
        return torch.where(is_prompt_GL, self.model.config.mask_token_id, self._state.canvases.tokens[rows_G, :width])

    def _unconditional_slots(self, guided_G: Tensor, columns_RK: Tensor, scored_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scored slots of the guided rows in their masked-prompt canvases, which follow all others.

        Returns:
            indices into the flattened [(R + G) * K], and for each the position in `scored_N` of its conditional slot.
        """
        R, K = columns_RK.shape
        unconditional_R = torch.full((R,), -1, device=scored_N.device)
        unconditional_R[guided_G] = torch.arange(R, R + len(guided_G), device=scored_N.device)
        if self._is_static:
            of_T = (guided_G[:, None] * K + torch.arange(K, device=guided_G.device)).flatten()
        else:
            of_T = (unconditional_R[scored_N // K] >= 0).nonzero()[:, 0]
        return unconditional_R[scored_N[of_T] // K] * K + scored_N[of_T] % K, of_T

    def _with_cache(self, rows: Sequence[ActiveRow], columns_RK: Tensor, scored_N: Tensor) -> Tensor:
        """Compute the logits [N, V] of rows with a KV cache: run whole, or only the columns of `_windows`."""
        rows_R = self._tensor([row.slot for row in rows])
        lengths = [row.length for row in rows]
        width = self._width(lengths)
        kv_cache = self._cache_for([row.slot for row in rows], width)
        if rows[0].kind is ForwardKind.REFRESH:
            ids_RL = self._state.canvases.tokens[rows_R, :width]
            # Columns past a short row's end are not attended to, so they may be cached.
            return self._run(rows, ids_RL, lengths, columns_RK, scored_N, kv_cache=kv_cache)
        begins, ends = self._windows(rows)
        windows = [end - begin for begin, end in zip(begins, ends, strict=True)]
        # Blocks have few distinct lengths, unlike prompts and the columns after a block.
        is_of_blocks = rows[0].kind in (ForwardKind.BLOCK, ForwardKind.COMMIT)
        is_of_blocks |= all(row.request.params.cache is Cache.DUAL for row in rows)
        window = self._rounded(windows, are_many=not is_of_blocks)
        columns_RQ = self._tensor(begins)[:, None] + torch.arange(window, device=rows_R.device)
        # Surplus columns of rows with a shorter window are run in vain; the cache's spare last column takes them.
        columns_RQ = torch.where(columns_RQ < self._tensor(ends)[:, None], columns_RQ, width)
        ids_RQ = self._state.canvases.tokens[rows_R[:, None], columns_RQ.clamp(max=self._state.width - 1)]
        queries_RK = columns_RK - self._tensor(begins)[:, None]
        return self._run(rows, ids_RQ, lengths, queries_RK, scored_N, kv_cache=kv_cache, columns_RL=columns_RQ)

    def _windows(self, rows: Sequence[ActiveRow]) -> tuple[list[int], list[int]]:
        """Return the columns of each row to run on top of its KV cache: the first, and the one after the last."""
        # A policy that predicts a slot from the column before it needs that column too. (On the CPU, to avoid a sync.)
        begins = self.model.predicting_columns(torch.tensor([row.block_start for row in rows])).tolist()
        if rows[0].kind.caches_finished:
            # The cache entry of that column is written again, with the same values.
            first = [min(begin, row.num_cached) for begin, row in zip(begins, rows, strict=True)]
            return first, [row.length for row in rows]
        ends = [
            row.length
            if row.request.params.cache is Cache.PREFIX
            else row.block_start + row.request.params.block_length
            for row in rows
        ]
        return begins, ends

    def _run(
        self,
        rows: Sequence[ActiveRow],
        ids_RL: Tensor,
        lengths: Sequence[int],
        queries_RQ: Tensor,
        scored_N: Tensor,
        *,
        kv_cache: KVCache | None = None,
        columns_RL: Tensor | None = None,
    ) -> Tensor:
        width = ids_RL.shape[1] if kv_cache is None else kv_cache.width
        is_padded = any(length != width for length in lengths)
        self.counts.num_forwards += 1
        self.counts.num_rows += len(ids_RL)
        if is_padded and kv_cache is None and self._concatenates_rows:
            return self._run_back_to_back(ids_RL, torch.tensor(lengths), queries_RQ, scored_N)
        self.counts.num_tokens += ids_RL.numel()
        # A block narrower than the widest one queries past its row's end; those results are ignored.
        queries_RQ = queries_RQ.clamp(max=ids_RL.shape[1] - 1)
        if self.model.config.is_block_causal:
            blocks_R = self._tensor([row.request.params.block_length for row in rows])
            return self._forward(
                ids_RL, None, queries_RQ, scored_N, kv_cache=kv_cache, columns_BL=columns_RL, block_lengths_B=blocks_R
            )
        # A GPU's flash kernel takes no mask.
        lengths_R = self._tensor(lengths) if is_padded else None
        return self._forward(ids_RL, lengths_R, queries_RQ, scored_N, kv_cache=kv_cache, columns_BL=columns_RL)

    def _run_back_to_back(self, ids_RL: Tensor, lengths_R: Tensor, queries_RQ: Tensor, scored_N: Tensor) -> Tensor:
        """Run rows back to back as one, without padding; `lengths_R` is on the CPU."""
        self.counts.num_tokens += int(lengths_R.sum())
        places_T = (torch.arange(ids_RL.shape[1]) < lengths_R[:, None]).flatten().nonzero()[:, 0]
        ids_1T = ids_RL.flatten()[to_device_async(places_T, ids_RL.device)][None]
        queried_R = torch.full_like(lengths_R, queries_RQ.shape[1])
        ragged = RaggedRows.of(lengths_R, queried_R, partial(to_device_async, device=ids_RL.device))
        begins_R1 = ragged.tokens.ends[:-1, None].long()
        # Clamped as in `_run`, to the end of each row.
        last_R1 = ragged.tokens.ends[1:, None] - 1
        queries_1Q = (queries_RQ + begins_R1).minimum(last_R1).view(1, -1)
        return self._forward(ids_1T, None, queries_1Q, scored_N, ragged=ragged)

    def _cache_for(self, rows: list[int], width: int) -> KVCache:
        num_rows, num_columns = self._kv_cache[0][0].shape[:2] if self._kv_cache else (0, 0)
        if num_rows < self._state.num_slots or num_columns <= width:
            # A cache that is kept gets room for the next batch too.
            rounded = _bucketed(self._state.width) if self._is_cache_kept else 0
            wide = max(self._state.width, min(rounded, self.model.config.max_sequence_length))
            self._grow_cache(max(num_rows, self._state.num_slots), max(num_columns, wide + 1))
        return KVCache(self._kv_cache, self._tensor(rows), width, is_prefix=rows == list(range(len(rows))))

    def _grow_cache(self, num_rows: int, num_columns: int) -> None:
        """Grow the KV cache layer by layer, so that there are never two whole caches."""
        config, weight = self.model.config, self.model.embed.weight
        shape = (num_rows, num_columns, config.num_kv_heads, config.head_dim)
        nothing = weight.new_empty(0, 0, *shape[2:])
        for index in range(config.num_layers):
            keys, values = self._kv_cache[index] if index < len(self._kv_cache) else (nothing, nothing)
            self._kv_cache[index : index + 1] = [(self._wider(keys, shape), self._wider(values, shape))]

    def _wider(self, kv_cache: Tensor, shape: tuple[int, ...]) -> Tensor:
        wider = kv_cache.new_zeros(shape)
        wider[: kv_cache.shape[0], : kv_cache.shape[1]] = kv_cache
        if self._is_cache_kept:
            # A CUDA graph writes only to the addresses that it was recorded with.
            torch._dynamo.mark_static_address(wider, guard=False)
        return wider

    def _width(self, lengths: list[int]) -> int:
        return min(self._rounded(lengths, are_many=True), self._state.width, self.model.config.max_sequence_length)

    def _rounded(self, lengths: list[int], *, are_many: bool) -> int:
        """Return the width at which rows of these lengths are run. Equal lengths are not rounded, so that they need no
        mask, unless a compiler would see many lengths."""
        longest = max(lengths)
        is_rounded = (self._is_compiled and are_many) or min(lengths) != longest
        return _bucketed(longest) if self._is_static and is_rounded else longest

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return on_device(values, self._state.device)


def _bucketed(width: int) -> int:
    return -(-width // _BUCKET) * _BUCKET
