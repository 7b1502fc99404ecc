"""Entropy-bounded sampling with renoising (DiffusionGemma): requests in, completions out.

A canvas begins as random ids. A step draws a token for every slot, keeps those of the least uncertain slots, and puts
fresh random ids in all others; nothing stays kept: the next step, conditioned on this one's logits, decides anew. When
the most probable tokens stay the same and the policy is sure of them they are committed, and the next canvas begins
behind them.

What is returned was never drawn, so it has no log-probability. What was kept was: slots are chosen by their entropies,
before the draw, so the sum over steps of the log-probabilities of the kept draws is the exact log-likelihood of the
trajectory (`learner/estimators/renoised.py`).

Shape letters: C slots of the canvas, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.model.renoising.policy import Prefix, RenoisingPolicy
from learner.model.renoising.record import DenoisedCanvas
from rollout.drawing import predictions
from rollout.renoising.draws import Draws, KeyedDraws
from rollout.renoising.request import (
    RenoisedCompletion,
    RenoisingParams,
    RenoisingRequest,
    check_renoising_request,
)
from rollout.request import FinishReason

Watch = Callable[[int, int, Tensor, Tensor], None]
"""Called after each step with the numbers of the canvas and the step, the canvas [C] as it stands, and bool [C] what of
it was kept."""


class _Step(NamedTuple):
    """What a step did: [C] each, and a number."""

    seen: Tensor
    drawn: Tensor
    logp: Tensor
    accepted: Tensor
    argmax: Tensor
    mean_entropy: Tensor
    temperature: float


class RenoisingSampler:
    """Samples completions from one policy version, one request after the other."""

    def __init__(self, policy: RenoisingPolicy, policy_version: int) -> None:
        """Sample from `policy`, which stays where it is and as it is."""
        self.policy, self.policy_version = policy, policy_version

    def generate(self, requests: Sequence[RenoisingRequest], watch: Watch | None = None) -> list[RenoisedCompletion]:
        """Completions of `requests`, in their order.

        Raises:
            ValueError: a request that the policy cannot serve; the sentence has its index and field.
            FloatingPointError: the policy's weights are bad: it predicts what is no number.
        """
        for index, request in enumerate(requests):
            try:
                check_renoising_request(request, self.policy.config)
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        return [self.complete(request, watch=watch) for request in requests]

    @torch.inference_mode()
    def complete(
        self, request: RenoisingRequest, draws: Draws | None = None, watch: Watch | None = None
    ) -> RenoisedCompletion:
        """The completion of one request, by its own draws or by others."""
        config, device = self.policy.config, self.policy.device
        draws = draws or KeyedDraws(request.seed, config.canvas_length, config.vocab_size, device)
        stop_ids = torch.tensor(request.stop_ids if request.stop_ids is not None else config.stop_ids, device=device)
        prefix, behind = self.policy.prefix(), torch.tensor(request.prompt_ids, device=device)
        canvases, texts = list[DenoisedCanvas](), list[np.ndarray]()
        for number in range(-(-request.params.gen_length // config.canvas_length)):
            self.policy.finish(prefix, behind)
            canvases.append(self._denoise(number, prefix, request.params, draws, watch))
            behind = torch.from_numpy(canvases[-1].token_ids.astype(np.int64)).to(device)
            is_stop_C = torch.isin(behind, stop_ids)
            after_C = is_stop_C.cumsum(0) - is_stop_C.long() > 0
            texts.append(behind.masked_fill(after_C, config.pad_token_id).cpu().numpy().astype(np.int32))
            if bool(is_stop_C.any()):
                break
        token_ids = np.concatenate(texts)
        ends = np.isin(token_ids, stop_ids.cpu().numpy())[: request.params.gen_length].nonzero()[0]
        return RenoisedCompletion(
            token_ids=token_ids,
            num_tokens=int(ends[0]) + 1 if len(ends) else request.params.gen_length,
            canvases=tuple(canvases),
            finish_reason=FinishReason.EOS if len(ends) else FinishReason.LENGTH,
            policy_version=self.policy_version,
        )

    def _denoise(
        self, number: int, prefix: Prefix, params: RenoisingParams, draws: Draws, watch: Watch | None
    ) -> DenoisedCanvas:
        """One canvas, behind what is finished."""
        canvas_C, conditioning_CV = draws.initial(number), None
        before = deque[Tensor](maxlen=params.stability_threshold)
        steps = list[_Step]()
        for index in range(params.max_denoise_steps):
            temperature = params.temperature(index)
            tempered_CV = self.policy(prefix, canvas_C, conditioning_CV) / temperature
            predicted = predictions(tempered_CV.clone())
            if not bool(predicted.log_norm.isfinite().all()):
                raise FloatingPointError(f"the policy predicts what is no number on canvas {number}: bad weights")
            slots_C = torch.arange(len(canvas_C), device=canvas_C.device)
            drawn_C, argmax_C = draws.tokens(number, index, predicted), tempered_CV.argmax(dim=-1)
            entropy_C = predicted.entropy(slots_C)
            accepted_C = within_bound(entropy_C, params.entropy_bound)
            logp_C, mean_entropy = predicted.logp(slots_C, drawn_C), entropy_C.mean()
            steps.append(_Step(canvas_C, drawn_C, logp_C, accepted_C, argmax_C, mean_entropy, temperature))
            canvas_C = torch.where(accepted_C, drawn_C, draws.fresh(number, index))
            if watch is not None:
                watch(number, index, canvas_C, accepted_C)
            is_stable = len(before) == params.stability_threshold and all(torch.equal(argmax_C, one) for one in before)
            if is_stable and float(mean_entropy) < params.confidence_threshold:
                break
            before.append(argmax_C)
            conditioning_CV = tempered_CV
        return _record(steps)


def within_bound(entropy_C: Tensor, bound: float) -> Tensor:
    """[C] bool: the slots of the least entropy, as long as those before them have `bound` nats together at most."""
    sorted_C, order_C = entropy_C.sort(stable=True)
    is_within_C = sorted_C.cumsum(0) - sorted_C <= bound
    return torch.zeros_like(is_within_C).scatter_(0, order_C, is_within_C)


def _record(steps: Sequence[_Step]) -> DenoisedCanvas:
    columns = [torch.stack(column).cpu().numpy() for column in list(zip(*steps, strict=True))[:-1]]
    seen, drawn, logp, accepted, argmax, mean_entropy = columns
    return DenoisedCanvas(
        seen=seen.astype(np.int32),
        drawn=drawn.astype(np.int32),
        drawn_logp=logp,
        accepted=accepted,
        argmax=argmax.astype(np.int32),
        mean_entropy=mean_entropy,
        temperatures=np.array([step.temperature for step in steps], dtype=np.float32),
    )
