"""Samplers of peers against ours, on the same random weights, prompts and schedules.

The first d1 samples whole canvases. Fast-dLLM has a prefix and a dual cache, which compute what ours do, with a fixed
number of tokens per step or a confidence threshold. At temperature 0 peers and d1 give the same tokens, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.peers.checkouts import Generate, Peers
from benchmarks.gpu.setting import Row, Setting, random_policy
from benchmarks.measure import in_turn, ratio
from benchmarks.models import make_prompts
from benchmarks.sampler import requests_of
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.request import Cache, SamplingOrder, SamplingParams
from rollout.sampler import Sampler

Sample = Callable[[Tensor, SamplingParams], Tensor]
"""Maps prompts [B, P] to canvases [B, P + L]."""

# Random weights are never confident, so the threshold is where this share of a fresh canvas is below it.
_BELOW_THRESHOLD = 0.75


@dataclass(frozen=True, slots=True)
class Comparison:
    """A peer's sampler, and the schedule of both sides."""

    peer: str
    sample: Sample
    params: SamplingParams


def compare(setting: Setting, dtype: torch.dtype, peers: Peers, rounds: int, *, is_compiled: bool) -> Iterator[Row]:
    """Time each peer's sampler and ours in turn, for each number of rows."""
    policy = random_policy(setting, dtype)
    network = peers.fast_dllm.network(policy)
    for num_rows in setting.slots:
        prompts = make_prompts(num_rows, setting.prompt_tokens, setting.shape.vocab_size, setting.device)
        engine = EngineConfig(
            num_slots=num_rows, dtype="float32" if dtype is torch.float32 else "bfloat16", compile=is_compiled
        )
        sampler = Sampler(policy, 0, engine)
        for comparison in _comparisons(setting, policy, network, peers):
            params = comparison.params
            works: dict[str, Callable[[], Tensor]] = {
                "peer": partial(comparison.sample, prompts, params),
                "d1": partial(_ours, sampler, prompts, params),
            }
            # The warm-up.
            canvases = {name: work()[:, -setting.gen_length :].cpu() for name, work in works.items()}
            taken = in_turn(works, rounds, setting.device)
            num_tokens = num_rows * setting.gen_length
            yield {
                "what": f"{comparison.peer}, {_schedule(params)}",
                "rows": num_rows,
                "peer_tokens_per_s": num_tokens / float(np.median(taken["peer"])),
                "tokens_per_s": num_tokens / float(np.median(taken["d1"])),
                "speed_up": ratio(taken, "peer", "d1"),
                # Above temperature 0 both draw from their own generators.
                "same": None if params.temperature else _share_of_equal(canvases["peer"], canvases["d1"]),
            }


def _comparisons(setting: Setting, policy: Transformer, network: Any, peers: Peers) -> Iterator[Comparison]:
    first_d1 = partial(_first_d1, peers.first_trainer, network)
    yield Comparison("the first d1", first_d1, setting.params())
    in_its_order = {"temperature": 0.9, "drawing": SamplingOrder.SAMPLE_THEN_SELECT}
    yield Comparison("the first d1", first_d1, setting.params(**in_its_order))
    threshold = _threshold(setting, policy)
    for cache in (Cache.NONE, Cache.PREFIX, Cache.DUAL):
        sample = partial(_fast_dllm, peers.fast_dllm.samplers[cache], network)
        yield Comparison("Fast-dLLM", sample, setting.params(cache=cache))
        yield Comparison("Fast-dLLM", sample, setting.params(cache=cache, threshold=threshold))


def _share_of_equal(some: Tensor, others: Tensor) -> float:
    return float((some == others).double().mean())


def _schedule(params: SamplingParams) -> str:
    by = f"{params.num_denoise_steps} steps" if params.threshold is None else f"threshold {params.threshold:.3f}"
    cached = "no cache" if params.cache is Cache.NONE else f"{params.cache} cache"
    return f"{cached}, {by}, temperature {params.temperature:g}"


@torch.inference_mode()
def _threshold(setting: Setting, policy: Transformer) -> float:
    """Choose a threshold that some of the slots of a fresh canvas exceed."""
    prompts = make_prompts(1, setting.prompt_tokens, setting.shape.vocab_size, setting.device)
    fresh = torch.full((1, setting.gen_length), policy.config.mask_token_id, device=setting.device)
    logits = policy(torch.cat((prompts, fresh), dim=1))[0, -setting.block_length :].float()
    logits[:, policy.config.mask_token_id] = -torch.inf
    return float(logits.softmax(dim=-1).amax(dim=-1).quantile(_BELOW_THRESHOLD))


def _ours(sampler: Sampler, prompts: Tensor, params: SamplingParams) -> Tensor:
    completions = sampler.generate(requests_of(prompts, params))
    return torch.from_numpy(np.stack([completion.token_ids for completion in completions]))


def _schedule_arguments(network: Any, params: SamplingParams) -> dict[str, Any]:
    """Return what all peers call alike."""
    return {
        "steps": params.num_denoise_steps,
        "gen_length": params.gen_length,
        "block_length": params.block_length,
        "temperature": params.temperature,
        "mask_id": network.config.mask_token_id,
    }


@torch.no_grad()
def _first_d1(trainer: type, network: Any, prompts: Tensor, params: SamplingParams) -> Tensor:
    """Sample by the trainer's `generate`. It leaves autograd on; here it is off, which can only make it faster."""
    made: Any = object.__new__(trainer)
    made.args = SimpleNamespace(fp16=False)
    canvases: Tensor = made.generate(network, prompts, **_schedule_arguments(network, params))
    return canvases


def _fast_dllm(generate: Generate, network: Any, prompts: Tensor, params: SamplingParams) -> Tensor:
    """Sample rows together or, with a version that only has a single row, one after another."""
    given = _schedule_arguments(network, params) | {"threshold": params.threshold}
    try:
        return generate(network, prompts, **given)[0]
    except RuntimeError:
        if len(prompts) == 1:
            raise
    return torch.cat([generate(network, prompt[None], **given)[0] for prompt in prompts])
