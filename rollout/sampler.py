"""The diffusion sampler: continuous batching of requests, one denoise step at a time.

Each row denoises one request, block by block from left to right. A step predicts the masked slots of every row's
block, each row's schedule chooses some of them, and a token is committed to each. A finished row leaves, and a waiting
request takes its slot at once.

Slots are selected first, by their predictions, and only those are sampled. A committed token is then a sample from
softmax(logits / T), and its recorded log-probability is exact. (LLaDA and d1 sample every slot and commit those whose
*sample* is probable, which is not a sample from softmax; at temperature 0 the two agree. `sample_then_select` does
this.)

Shape letters: A active rows, K slots of the longest block, N open slots, M slots that are committed, U slots that were
predicted, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from learner.model.attention.varlen import has_kernel
from learner.model.elementwise import fuse_elementwise
from learner.model.kv_cache import KeysValues
from learner.model.quantization.fp8 import check_device, quantize_to_fp8
from learner.model.transformer import Transformer
from rollout.batch_state import BatchState, RowState, on_device
from rollout.config import EngineConfig
from rollout.constrained import ConstrainedRows
from rollout.forwards import ActiveRow, ForwardCounts, ForwardKind, Forwards, SlotLogits
from rollout.logs.edit_log import EditLog
from rollout.logs.step_answers import CanvasSlots, StepAnswerLog
from rollout.request import Cache, Completion, Progress, Request, SamplingParams, canvas_of
from rollout.request_checks import check_request
from rollout.step import BlockSlots, CommittedTokens, DenoiseStep


class Sampler:
    """Samples completions from a policy, one version of it at a time."""

    def __init__(self, model: Transformer, policy_version: int, engine: EngineConfig | None = None) -> None:
        """Sample from `model`, on its device. Its weights must not change while a batch is open.

        `engine.fp8` and `engine.compile: elementwise` change the layers of `model` in place, for all its users.

        Raises ValueError if `engine.fp8` is set, and the policy or its device cannot compute in FP8.
        """
        self.model = model
        self.policy_version = policy_version
        """Policy version that the next batch records in its completions; to be set together with the weights."""
        self._engine = engine or EngineConfig()
        if self._engine.fp8:
            if refusal := self._engine.incompatibility(model.config):
                raise ValueError(refusal)
            check_device(next(model.parameters()).device)
        self._forward = partial(
            _compiled(model) if self._engine.compiles_policy else model, flex=self._engine.attention == "flex"
        )
        self.counts = ForwardCounts()
        self._kv_cache: list[KeysValues] = []

    def generate(
        self, requests: Sequence[Request], on_completion: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """Sample completions of `requests`, in their order.

        Args:
            requests: at most `num_slots` of them are denoised at a time; their parameters may differ.
            on_completion: called with each request's index and completion as soon as it is done.

        Raises:
            ValueError: the policy cannot serve a request; the message has its index and field.
            FloatingPointError: a prediction is not finite: the policy's weights are bad.
        """
        # CUDA graphs of a compiled policy are bound to one KV cache, so each batch passes it on to the next, unless it
        # fails: a NaN in the cache would spread to later batches, for a mask gives it weight 0, and 0 times NaN is NaN.
        kv_cache, self._kv_cache = (self._kv_cache if self._engine.compiles_policy else None), []
        batch = self._batch(len(requests), kv_cache)
        for index, request in enumerate(requests):
            try:
                batch.submit(request)
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        completions: dict[int, Completion] = {}
        while len(completions) < len(requests):
            for index, completion in batch.step():
                completions[index] = completion
                if on_completion is not None:
                    on_completion(index, completion)
        self._kv_cache = kv_cache or []
        return [completions[index] for index in range(len(requests))]

    def open(self, requests: Sequence[Request] = (), max_rows: int | None = None) -> SlotBatch:
        """Open a batch that the caller steps: its progress can be read, and more requests can be submitted.

        Args:
            requests: the first requests.
            max_rows: maximum rows that it will need, where that is less than `num_slots`.
        """
        batch = self._batch(max_rows, None)
        for request in requests:
            batch.submit(request)
        return batch

    def _batch(self, max_rows: int | None, kv_cache: list[KeysValues] | None) -> SlotBatch:
        if self._engine.fp8:
            # The weights may have changed.
            quantize_to_fp8(self.model)
        if self._engine.compile == "elementwise":
            fuse_elementwise(self.model)
        num_slots = self._engine.num_slots if max_rows is None else min(self._engine.num_slots, max(1, max_rows))
        return SlotBatch(self, self._forward, self._engine, num_slots, kv_cache)


_Number = TypeVar("_Number", int, Tensor)


class _RowSnapshot(NamedTuple, Generic[_Number]):
    """State of a row as the host last read it; with tensors, the state of several rows, [A]."""

    is_done: _Number
    step_in_block: _Number
    block_start: _Number
    first_equal_slot: _Number
    """The first slot with an equal canvas."""
    is_not_finite: _Number
    """Whether a prediction for the row was not finite."""


class SlotBatch:
    """Continuous batch: rows that are denoised together, and requests that wait for a slot."""

    def __init__(
        self,
        sampler: Sampler,
        forward: Callable[..., Tensor],
        engine: EngineConfig,
        num_slots: int,
        kv_cache: list[KeysValues] | None,
    ) -> None:
        """Make empty slots. Call `Sampler.open` instead."""
        model, config = sampler.model, sampler.model.config
        device = next(model.parameters()).device
        self._is_static = engine.static_shapes or device.type == "cuda"
        self._config, self._policy_version = config, sampler.policy_version
        self._steps_per_sync = engine.steps_per_sync
        self._is_cache_exact = model.is_cache_exact
        self._caches_blocks = config.is_block_causal and engine.block_cache
        self.state = BatchState(num_slots, config, device)
        self._forwards = Forwards(
            model,
            forward,
            self.state,
            sampler.counts,
            kv_cache=kv_cache,
            is_static=self._is_static,
            is_compiled=engine.compiles_policy,
            concatenates_rows=_concatenates_rows(model, engine),
        )
        self._constrained = ConstrainedRows(self.state, config)
        self._edit_log = EditLog()
        self._step_answers = StepAnswerLog()
        self._is_compiled = engine.compiles_policy
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, tuple[int, Request]] = {}
        self._snapshots: dict[int, _RowSnapshot[int]] = {}
        self._num_cached: dict[int, int] = {}
        """By slot: columns in the KV cache of finished blocks, where the policy has one."""
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """Queue a request for a slot. Returns its index: 0, 1, 2, ...

        Raises ValueError, naming the field, if the policy cannot serve it.
        """
        check_request(request, self._config)
        trained, asked = self._config.block_length, request.params.block_length
        if trained not in (None, asked):
            # Python shows each such warning once.
            warnings.warn(
                f"block_length {asked} is not the {trained} slots that the policy's config names: it may not have been "
                "trained with such blocks",
                stacklevel=2,
            )
        self._waiting.append((self._num_submitted, request))
        self._num_submitted += 1
        return self._num_submitted - 1

    @property
    def num_running(self) -> int:
        """Rows that are being denoised."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @torch.inference_mode()
    def cancel(self, index: int) -> None:
        """Drop a request; the next step can reuse its slot. Does nothing if it is done or unknown."""
        self._waiting = deque(item for item in self._waiting if item[0] != index)
        slot = self._slot_of(index)
        if slot is not None:
            self.state.clear(slot)
            self._edit_log.forget(slot)
            self._step_answers.forget(slot)
            self._constrained.forget(slot)
            del self._running[slot]

    def num_committed(self) -> dict[int, int]:
        """Return the slots in finished blocks of each running request, as of the last step, without synchronization."""
        return {
            # A block-causal policy's first block may begin in the prompt.
            index: max(0, self._snapshots[slot].block_start - len(request.prompt_ids))
            for slot, (index, request) in self._running.items()
        }

    @torch.inference_mode()
    def progress(self, indices: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of those requests that are running. Synchronizes with the device if there are any."""
        slots = {index: slot for slot, (index, _) in self._running.items() if index in set(indices)}
        if not slots:
            return {}
        requests = [self._running[slot][1] for slot in slots.values()]
        num_committed = [self.num_committed()[index] for index in slots]
        return dict(zip(slots, self.state.progress([*slots.values()], requests, num_committed), strict=True))

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Fill the free slots, denoise for a step, and return the completions that are done, with their indices.

        With `steps_per_sync` above 1, and no KV cache, it denoises for so many steps before it checks what is done.
        """
        self._admit()
        active = self._active()
        if active:
            has_cache = any(row.kind is not ForwardKind.UNCACHED for row in active)
            for _ in range(1 if has_cache else self._steps_per_sync):
                self._denoise(active)
                # Which canvases are equal after that is only known after the next `_sync`.
                active = [replace(row, first_equal_slot=row.slot) for row in active]
            self._sync([row.slot for row in active])
        return self._harvest()

    def _admit(self) -> None:
        free = [slot for slot in range(self.state.num_slots) if slot not in self._running]
        taken = [(slot, *self._waiting.popleft()) for slot in free[: len(self._waiting)]]
        if taken:
            slots = [slot for slot, _, _ in taken]
            self.state.admit(slots, [request for _, _, request in taken])
            for slot, _, request in taken:
                self._constrained.admit(slot, request)
            self._running |= {slot: (index, request) for slot, index, request in taken}
            self._num_cached |= dict.fromkeys(slots, 0)
            # All rows: the row in the first equal slot of a remaining one may have left for another request.
            self._sync([*self._running])

    def _slot_of(self, index: int) -> int | None:
        return next((slot for slot, (running, _) in self._running.items() if running == index), None)

    def _sync(self, slots: list[int]) -> None:
        """Read the state of these rows from the device, in one synchronization."""
        rows_A = on_device(slots, self.state.device)
        rows = self.state.rows
        columns = _RowSnapshot(
            is_done=rows.done[rows_A].long(),
            step_in_block=rows.step_in_block[rows_A],
            block_start=rows.block_start[rows_A],
            first_equal_slot=self.state.equal_canvases(rows_A),
            is_not_finite=rows.not_finite[rows_A].long(),
        )
        snapshots = (_RowSnapshot[int](*row) for row in torch.stack(columns, dim=1).tolist())
        self._snapshots |= zip(slots, snapshots, strict=True)
        not_finite = [self._running[slot][0] for slot in slots if self._snapshots[slot].is_not_finite]
        if not_finite:
            raise FloatingPointError(
                f"the policy has logits that are not finite for request {not_finite[0]}: bad weights"
            )

    def _active(self) -> list[ActiveRow]:
        active = []
        for slot, (_, request) in self._running.items():
            snapshot = self._snapshots[slot]
            if not snapshot.is_done:
                num_cached = self._num_cached[slot]
                kind = self._kind(request.params, snapshot, num_cached)
                active.append(
                    ActiveRow(
                        slot,
                        request,
                        kind,
                        first_equal_slot=snapshot.first_equal_slot,
                        block_start=snapshot.block_start,
                        length=self._visible_columns(request, snapshot.block_start, kind),
                        num_cached=num_cached,
                    )
                )
        return sorted(active, key=lambda row: (row.kind, row.slot))

    def _kind(self, params: SamplingParams, snapshot: _RowSnapshot[int], num_cached: int) -> ForwardKind:
        if self._caches_blocks and not params.cfg_scale:
            if num_cached == snapshot.block_start:
                return ForwardKind.BLOCK
            return ForwardKind.COMMIT if num_cached else ForwardKind.PREFILL
        if params.cache is Cache.NONE:
            return ForwardKind.UNCACHED
        every = params.cache_refresh_steps
        is_refresh = snapshot.step_in_block % every == 0 if every else snapshot.step_in_block == 0
        return ForwardKind.REFRESH if is_refresh else ForwardKind.CACHED

    def _visible_columns(self, request: Request, block_start: int, kind: ForwardKind) -> int:
        """Return the number of canvas columns that the block beginning at `block_start` can attend to."""
        # A row may move on to its next block between two synchronizations.
        is_current = self._steps_per_sync == 1 or kind is not ForwardKind.UNCACHED
        if self._config.is_block_causal and is_current:
            return block_start + request.params.block_length
        return canvas_of(request, self._config).end

    def _denoise(self, active: list[ActiveRow]) -> None:
        """Run one denoise step of all active rows: forwards, selection, sampling and commit."""
        params = [row.request.params for row in active]
        rows_A = on_device([row.slot for row in active], self.state.device)
        before = self.state.rows.of(rows_A)
        block = self._block(rows_A, before, params)
        num_places = block.columns.shape[1]
        found = self._logits(active, rows_A, before, block)
        self._constrained.forbid(active, block.columns, found)
        step = DenoiseStep(params, before, block, found)
        self.state.rows.not_finite[rows_A] |= step.non_finite_rows()
        chosen_AK, fallback_AK = step.select()
        # Static shapes: slots that are not chosen may be written too, with their old values.
        picked_M = (
            _first_chosen(chosen_AK, max(p.max_committed for p in params))
            if self._is_static
            else chosen_AK.flatten()[found.index].nonzero()[:, 0]
        )
        index_M = found.index[picked_M]
        where = rows_A[index_M // num_places], block.columns.flatten()[index_M]
        sampled, chosen_M = step.sample(picked_M), chosen_AK.flatten()[index_M]
        chosen_M = self._constrained.fitting(active, where, sampled, chosen_M)
        self._write(where, sampled, fallback_AK.flatten()[index_M], chosen_M)
        editing = [row.slot for row in active if row.request.params.edits]
        if editing:
            slots_M = where[1] - before.prompt_length[index_M // num_places]
            self._edit_log.add(editing, where[0], slots_M, sampled, chosen_M)
        self.state.advance(rows_A, before, block.masked, chosen_AK)
        self._num_cached |= {row.slot: row.block_start for row in active if row.kind.caches_finished}

    def _logits(self, active: list[ActiveRow], rows_A: Tensor, now: RowState, block: BlockSlots) -> SlotLogits:
        """Compute the logits of the blocks' open slots, without forbidden tokens, and log the step's answers."""
        places = {row.slot: place for place, row in enumerate(active) if row.request.num_step_answers}
        if not places:
            found = self._forwards.logits(active, block.columns, block.open)
            self._forbid(found, active, block.columns.shape[1])
            return found
        canvases = [canvas_of(row.request, self._config) for row in active]
        # A compiler sees one width instead of one for each block.
        widths = [
            canvas.num_slots if self._is_compiled else canvas.end - row.block_start
            for canvas, row in zip(canvases, active, strict=True)
        ]
        num_slots = max(block.columns.shape[1], *widths)
        slots = CanvasSlots.of(block, self.state.canvases, rows_A, num_slots)
        found = self._forwards.logits(active, slots.columns, slots.open)
        self._forbid(found, active, num_slots)
        requests = [row.request for row in active]
        self._step_answers.add(places, slots.answers(found, self.state.canvases.tokens[rows_A], requests, now))
        return slots.of_block(found, block, is_static=self._is_static)

    def _block(self, rows_A: Tensor, now: RowState, params: Sequence[SamplingParams]) -> BlockSlots:
        """Return the slots of each row's block, and which of them may be written."""
        canvases = self.state.canvases
        places_K = torch.arange(max(p.block_length for p in params), device=rows_A.device)
        columns_AK = now.block_start[:, None] + places_K
        where = rows_A[:, None], columns_AK
        is_here_AK = (places_K < now.block_length[:, None]) & ~now.done[:, None]
        editable_AK = tokens_AK = None
        if any(p.edits for p in params):
            # Given tokens have no step, and are not edited.
            editable_AK = is_here_AK & now.edits[:, None] & (canvases.step_map[where] >= 0)
            tokens_AK = canvases.tokens[where]
        return BlockSlots(
            columns=columns_AK, masked=canvases.masked[where] & is_here_AK, editable=editable_AK, tokens=tokens_AK
        )

    def _write(
        self, where: tuple[Tensor, Tensor], sampled: CommittedTokens, fallback_M: Tensor, chosen_M: Tensor
    ) -> None:
        """Commit the tokens, with their step, log-probabilities and entropies."""
        canvases = self.state.canvases
        is_all = not self._is_static and not self._constrained.is_any
        for target, value_M in (
            (canvases.tokens, sampled.tokens),
            (canvases.step_map, sampled.steps),
            (canvases.logp, sampled.logp),
            (canvases.logp_raw, sampled.logp_raw),
            (canvases.entropy, sampled.entropy),
            (canvases.distribution_entropy, sampled.distribution_entropy),
            (canvases.fallback, fallback_M),
            (canvases.masked, torch.zeros_like(fallback_M)),
        ):
            target[where] = value_M if is_all else torch.where(chosen_M, value_M, target[where])

    def _forbid(self, found: SlotLogits, active: list[ActiveRow], num_places: int) -> None:
        """Set the logits of the mask id and of each row's forbidden ids to -inf."""
        logits_UV, mask_id = found.logits, self._config.mask_token_id
        logits_UV[:, mask_id] = -torch.inf
        width = max(len(row.request.params.forbidden_ids) for row in active)
        if width:
            ids = [row.request.params.forbidden_ids for row in active]
            ids_AF = on_device([[*i, *[mask_id] * (width - len(i))] for i in ids], logits_UV.device)
            owner_U = torch.zeros(len(logits_UV), dtype=torch.int64, device=logits_UV.device)
            owner_U[found.source] = found.index // num_places
            logits_UV.scatter_(1, ids_AF[owner_U], -torch.inf)

    def _harvest(self) -> list[tuple[int, Completion]]:
        done = [slot for slot in self._running if self._snapshots[slot].is_done]
        if not done:
            return []
        indices, requests = zip(*(self._running.pop(slot) for slot in done), strict=True)
        for slot in done:
            self._constrained.forget(slot)
        completions = self.state.harvest(done, requests, self._policy_version, is_cache_exact=self._is_cache_exact)
        return list(zip(indices, map(self._with_logs, done, requests, completions), strict=True))

    def _with_logs(self, slot: int, request: Request, completion: Completion) -> Completion:
        """Add what is logged of a finished row step by step."""
        if request.params.edits:
            return replace(completion, writes=self._edit_log.take(slot))
        if request.num_step_answers:
            stop_ids = self._config.stop_ids if request.params.stop_ids is None else request.params.stop_ids
            return replace(completion, step_answers=self._step_answers.take(slot, request, completion, stop_ids))
        return completion


def _concatenates_rows(model: Transformer, engine: EngineConfig) -> bool:
    """Whether rows of unequal length are run back to back. Needs a variable-length attention kernel, and no compiler,
    which would see another number of tokens in every step."""
    weight, config = model.embed.weight, model.config
    is_eager = not engine.compiles_policy and engine.attention == "sdpa"
    return is_eager and not config.is_block_causal and has_kernel(weight.device, weight.dtype, config.head_dim)


def _compiled(model: Transformer) -> Callable[..., Tensor]:
    mode = "reduce-overhead" if next(model.parameters()).is_cuda else "default"
    compiled: Callable[..., Tensor] = torch.compile(model, mode=mode, fullgraph=True)

    def forward(*args: Tensor | None, **kwargs: Any) -> Tensor:
        # A CUDA graph writes its output to the same address every time.
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args, **kwargs).clone()

    return forward


def _first_chosen(chosen_AK: Tensor, max_per_row: int) -> Tensor:
    """Return indices into [A * K]: `max_per_row` of each row, chosen slots first. Only the device knows how many are
    chosen."""
    rows, places = chosen_AK.shape
    if max_per_row >= places:
        return torch.arange(rows * places, device=chosen_AK.device)
    order_AK = chosen_AK.long().sort(dim=1, descending=True, stable=True).indices
    return (torch.arange(rows, device=order_AK.device)[:, None] * places + order_AK[:, :max_per_row]).flatten()
