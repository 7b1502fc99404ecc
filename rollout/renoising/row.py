"""A row of the renoising sampler: one request that is denoised step by step.

A canvas begins as random ids. A step samples a token for every slot, keeps those of the least uncertain slots, and puts
fresh random ids in all others. Kept tokens are not final: the next step, conditioned on this one's logits, decides
again. When the most probable tokens are stable and have low entropy, or at the last step, they are committed, and the
next canvas begins after them.

Shape letters: C slots of the canvas, V vocabulary, L slots of all canvases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.model.renoising.policy import RenoisingPolicy
from learner.model.renoising.record import DenoisedCanvas
from rollout.renoising.random_source import KeyedRandomSource, RandomSource
from rollout.renoising.request import RenoisedCompletion, RenoisingRequest
from rollout.request import Committed, FinishReason, Progress
from rollout.token_sampling import predictions

StepCallback = Callable[[int, int, Tensor, Tensor], None]
"""Callback after each step: index of the canvas, index of the step, the canvas [C], and bool [C] which slots were kept.
"""


class _StepRecord(NamedTuple):
    """Record of a step: [C] each, and two numbers."""

    seen: Tensor
    sampled: Tensor
    logp: Tensor
    accepted: Tensor
    argmax: Tensor
    mean_entropy: Tensor
    temperature: float


class RenoisingRow:
    """A request and its denoising state."""

    def __init__(
        self,
        policy: RenoisingPolicy,
        request: RenoisingRequest,
        random_source: RandomSource | None = None,
        on_step: StepCallback | None = None,
    ) -> None:
        """Begin a request that the policy can serve. `random_source` replaces the random draws keyed by its seed."""
        config, device = policy.config, policy.device
        self._policy, self.request, self._on_step = policy, request, on_step
        self._num_slots = request.num_slots(config.canvas_length)
        self._random_source = random_source or KeyedRandomSource(
            request.seed, config.canvas_length, config.vocab_size, device
        )
        self._stop_ids = config.stop_ids if request.stop_ids is None else request.stop_ids
        self._prefix, self._unread = policy.prefix(), [request.prompt_ids]
        """The policy's cached prefix, and the token ids that are to be appended to it."""
        self._finished = [] if request.committed is None else [request.committed]
        if request.committed is not None:
            # One canvas at a time, as before the interruption: the result is bit-identical.
            whole = request.committed.token_ids.reshape(-1, config.canvas_length)
            self._unread += [tuple(canvas) for canvas in whole.tolist()]
        self._number = len(self._unread) - 1
        self._num_steps_before = 0 if request.committed is None else request.committed.num_steps
        self._canvases = list[DenoisedCanvas]()
        self._steps = list[_StepRecord]()
        self._before = deque[Tensor](maxlen=request.params.stability_threshold)
        self._canvas_C, self._conditioning_CV = torch.empty(0), torch.empty(0)
        self._since_C, self._entropy_C = torch.empty(0), torch.empty(0)
        self.is_done = False
        """Whether the completion is finished."""

    @property
    def num_steps(self) -> int:
        """Denoise steps done, including those before an interruption."""
        return self._num_steps_before + len(self._steps)

    @property
    def num_committed(self) -> int:
        """Slots of finished canvases."""
        return sum(map(len, self._finished))

    def step(self) -> None:
        """Run a forward of the decoder and update the canvas.

        Raises FloatingPointError if a prediction is not finite: the policy's weights are bad.
        """
        params, index = self.request.params, len(self._steps)
        if not self._steps:
            self._begin_canvas()
        temperature = params.temperature(index)
        conditioning_CV = self._conditioning_CV if self._steps else None
        tempered_CV = self._policy(self._prefix, self._canvas_C, conditioning_CV) / temperature
        predicted = predictions(tempered_CV.clone())
        if not bool(predicted.log_norm.isfinite().all()):
            raise FloatingPointError(f"the policy has logits that are not finite on canvas {self._number}: bad weights")
        slots_C = torch.arange(len(self._canvas_C), device=self._canvas_C.device)
        sampled_C, argmax_C = self._random_source.tokens(self._number, index, predicted), tempered_CV.argmax(dim=-1)
        entropy_C = predicted.entropy(slots_C)
        accepted_C = within_bound(entropy_C, params.entropy_bound)
        logp_C, mean_entropy = predicted.logp(slots_C, sampled_C), entropy_C.mean()
        self._update_since(accepted_C, sampled_C)
        self._steps.append(
            _StepRecord(self._canvas_C, sampled_C, logp_C, accepted_C, argmax_C, mean_entropy, temperature)
        )
        self._canvas_C = torch.where(accepted_C, sampled_C, self._random_source.fresh(self._number, index))
        self._conditioning_CV, self._entropy_C = tempered_CV, entropy_C
        if self._on_step is not None:
            self._on_step(self._number, index, self._canvas_C, accepted_C)
        before = self._before
        is_stable = len(before) == params.stability_threshold and all(torch.equal(argmax_C, one) for one in before)
        is_sure = is_stable and float(mean_entropy) < params.confidence_threshold
        before.append(argmax_C)
        if is_sure or len(self._steps) == params.max_denoise_steps:
            self._finish_canvas()

    def completion(self, policy_version: int) -> RenoisedCompletion:
        """Return the completion of a row that is done, with the trajectories of the canvases denoised here."""
        config, gen_length = self._policy.config, self.request.params.gen_length
        token_ids = np.concatenate([part.token_ids for part in self._finished])
        is_stop = np.isin(token_ids, self._stop_ids)
        after = is_stop.cumsum() - is_stop > 0
        ends = is_stop[:gen_length].nonzero()[0]
        return RenoisedCompletion(
            token_ids=np.where(after, np.int32(config.pad_token_id), token_ids),
            num_tokens=int(ends[0]) + 1 if len(ends) else gen_length,
            canvases=tuple(self._canvases),
            finish_reason=FinishReason.EOS if len(ends) else FinishReason.LENGTH,
            policy_version=policy_version,
        )

    def committed(self) -> Committed:
        """Return the record of the finished canvases: the most probable tokens of their last steps, not samples."""
        return Committed.joined(self._finished) or _empty_record(0)

    def progress(self) -> Progress:
        """Return the progress. A slot that the last step did not keep counts as masked, whatever it held before."""
        parts, accepted = list(self._finished), np.zeros(0, dtype=bool)
        if self._steps:
            parts.append(self._current_record())
            accepted = self._steps[-1].accepted.cpu().numpy()
        num_begun = sum(map(len, parts))
        masked = np.ones(self._num_slots, dtype=bool)
        masked[: self.num_committed] = False
        masked[self.num_committed : num_begun] = ~accepted
        slots = Committed.joined([*parts, _empty_record(self._num_slots - num_begun)])
        assert slots is not None, "there is a part for what has not begun"
        return Progress(num_steps=self.num_steps, num_committed=self.num_committed, masked=masked, slots=slots)

    def _begin_canvas(self) -> None:
        for ids in self._unread:
            self._policy.append(self._prefix, torch.tensor(ids, device=self._policy.device))
        self._unread = []
        self._canvas_C = self._random_source.initial(self._number)
        self._since_C = torch.full_like(self._canvas_C, -1)
        self._before.clear()

    def _update_since(self, accepted_C: Tensor, sampled_C: Tensor) -> None:
        """Note since which step each kept slot has held its token; -1 where none is kept."""
        is_same_C = (self._since_C >= 0) & (self._canvas_C == sampled_C)
        now_C = torch.where(is_same_C, self._since_C, self.num_steps)
        self._since_C = torch.where(accepted_C, now_C, -1)

    def _current_record(self) -> Committed:
        """Return the record of the current canvas after its last step."""
        step = self._steps[-1]
        distribution, raw = (step.logp, self._entropy_C), self._untempered(step.sampled, step.temperature)
        return _record(step.sampled, self._since_C, distribution, raw)

    def _untempered(self, tokens_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the last step's log-probabilities of tokens, and entropies, at temperature 1."""
        raw = predictions(self._conditioning_CV * temperature)
        slots_C = torch.arange(len(tokens_C), device=tokens_C.device)
        return raw.logp(slots_C, tokens_C), raw.entropy(slots_C)

    def _finish_canvas(self) -> None:
        last, nothing_C = self._steps[-1], torch.zeros_like(self._entropy_C)
        at_C = torch.full_like(last.argmax, self.num_steps - 1)
        raw = self._untempered(last.argmax, last.temperature)
        # The most probable tokens, which are not sampled: zeros, as at temperature 0.
        self._finished.append(_record(last.argmax, at_C, (nothing_C, nothing_C), raw))
        self._canvases.append(_canvas_of(self._steps))
        token_ids = self._canvases[-1].token_ids
        self._num_steps_before, self._steps, self._number = self.num_steps, [], self._number + 1
        self._unread = [tuple(token_ids.tolist())]
        is_last = self.num_committed == self._num_slots
        self.is_done = is_last or bool(np.isin(token_ids, self._stop_ids).any())


def within_bound(entropy_C: Tensor, bound: float) -> Tensor:
    """Return [C] bool: the slots of least entropy, as long as the entropies before them sum to at most `bound` nats."""
    sorted_C, order_C = entropy_C.sort(stable=True)
    is_within_C = sorted_C.cumsum(0) - sorted_C <= bound
    return torch.zeros_like(is_within_C).scatter_(0, order_C, is_within_C)


def _record(
    tokens_C: Tensor, steps_C: Tensor, distribution: tuple[Tensor, Tensor], raw: tuple[Tensor, Tensor]
) -> Committed:
    """Make the record of a canvas; `distribution` and `raw` are log-probabilities [C] and entropies [C], tempered or
    not."""
    (logp, entropy), (raw_logp, raw_entropy) = ([part.cpu().numpy() for part in pair] for pair in (distribution, raw))
    return Committed(
        token_ids=tokens_C.cpu().numpy().astype(np.int32),
        step_map=steps_C.cpu().numpy().astype(np.int32),
        commit_logp=logp,
        commit_logp_raw=raw_logp,
        commit_entropy=raw_entropy,
        commit_law_entropy=entropy,
        fallback=np.zeros(len(tokens_C), dtype=bool),
    )


def _empty_record(num_slots: int) -> Committed:
    ints, floats = np.zeros(num_slots, dtype=np.int32), np.zeros(num_slots, dtype=np.float32)
    return Committed(
        token_ids=ints,
        step_map=np.full(num_slots, -1, dtype=np.int32),
        commit_logp=floats,
        commit_logp_raw=floats,
        commit_entropy=floats,
        commit_law_entropy=floats,
        fallback=np.zeros(num_slots, dtype=bool),
    )


def _canvas_of(steps: Sequence[_StepRecord]) -> DenoisedCanvas:
    columns = [torch.stack(column).cpu().numpy() for column in list(zip(*steps, strict=True))[:-1]]
    seen, sampled, logp, accepted, argmax, mean_entropy = columns
    return DenoisedCanvas(
        seen=seen.astype(np.int32),
        drawn=sampled.astype(np.int32),
        drawn_logp=logp,
        accepted=accepted,
        argmax=argmax.astype(np.int32),
        mean_entropy=mean_entropy,
        temperatures=np.array([step.temperature for step in steps], dtype=np.float32),
    )
