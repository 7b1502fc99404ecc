"""GPU stages of the sampler: numerical accuracy (bfloat16, compiled) and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.setting import Row, Setting, random_policy
from benchmarks.measure import seconds
from benchmarks.models import LLADA_8B, random_adapter
from benchmarks.replay import replay
from benchmarks.roofline import limit
from learner.model.lora import copy_sharing_base, set_adapter
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.request import Completion, Request
from rollout.sampler import Sampler

_COUNT = 4
_STEPS_OF_BLOCK = 2
"""Denoise steps per block where accuracy is measured. Few, because float32 takes ten times as long."""


@torch.no_grad()
def precision(setting: Setting) -> Iterator[Row]:
    """Compare bfloat16 with float32, compiled with eager, and recorded with replayed log-probabilities."""
    exact = random_policy(setting, torch.float32)
    half = random_policy(setting, torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    ids = torch.randint(2, setting.shape.vocab_size, (_COUNT, setting.canvas_tokens), device=setting.device)
    ids[:, -setting.gen_length :: 2] = exact.config.mask_token_id
    masked = ids == exact.config.mask_token_id
    logps, half_logps = (model(ids)[masked].float().log_softmax(-1) for model in (exact, half))
    yield {
        "what": "bfloat16 against float32, on masked slots",
        "kl_nats": float((logps.exp() * (logps - half_logps)).sum(-1).mean()),
        "same_argmax": float((logps.argmax(-1) == half_logps.argmax(-1)).float().mean()),
    }
    del logps, half_logps
    steps = _STEPS_OF_BLOCK * setting.gen_length // setting.block_length
    drawn = setting.requests(_COUNT, temperature=1.0, num_denoise_steps=steps)
    for name, model in (("float32", exact), ("bfloat16", half)):
        gaps = _replay_gaps(model, drawn, Sampler(model, 0).generate(drawn))
        yield {
            "what": f"recorded against replayed log-probabilities, {name}",
            "mean_gap_nats": float(gaps.mean()),
            "largest_gap_nats": float(gaps.abs().max()),
        }
    del exact
    requests = setting.requests(_COUNT, num_denoise_steps=steps)
    eager, compiled = (Sampler(half, 0, EngineConfig(compile=way)).generate(requests) for way in (False, True))
    yield {"what": "tokens of the compiled policy that are the eager one's", "share": _share_of_same(eager, compiled)}


def sampler(setting: Setting) -> Iterator[Row]:
    """Measure tokens per second and milliseconds per step by batch size: eager, fused, compiled, with a KV cache."""
    model, short = random_policy(setting, torch.bfloat16), setting.of_two_blocks()
    whole = limit(masked_head=True, restricted=True)
    # Compiled last: it takes longest and may hit the time limit.
    cached = {"cache": "dual"}
    fused, fp8 = {"compile": "elementwise"}, {"compile": "elementwise", "fp8": True}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "eager": ({}, {}),
        "dual cache": ({}, cached),
        "fused": (fused, {}),
        "dual cache, fused": (fused, cached),
        "fused, FP8": (fp8, {}),
        "dual cache, compiled": ({"compile": True}, cached),
        "eager, an adapter": ({}, {}),
        "dual cache, an adapter": ({}, cached),
        "dual cache, compiled, an adapter": ({"compile": True}, cached),
        "compiled, an adapter": ({"compile": True}, {}),
        "compiled": ({"compile": True}, {}),
    }
    adapted, adapter = copy_sharing_base(model), random_adapter(model, setting.rank)
    set_adapter(adapted, adapter.matrices, adapter.scaling)
    for name, (engine, changes) in ways.items():
        for slots in setting.slots:
            sampled = adapted if "an adapter" in name else model
            if "fused" in name:
                # Fusion and FP8 change a policy in place.
                sampled = copy_sharing_base(sampled)
            policy = Sampler(
                sampled, 0, EngineConfig.model_validate({"num_slots": slots, "dtype": "bfloat16", **engine})
            )
            # Warm up with the same tensor shapes, so that all of them are compiled.
            policy.generate(short.requests(slots, num_denoise_steps=4, **changes))
            spent = seconds(partial(policy.generate, short.requests(slots, **changes)), setting.device)
            rate = slots * short.gen_length / spent
            yield {
                "what": f"sampler, {slots} slots, {name}",
                "tokens_per_s": rate,
                "ms_per_step": 1e3 * spent / short.num_steps,
                # The limit of the exact sampler. A cache may exceed it.
                "of_limit": rate / whole if setting.shape == LLADA_8B else None,
            }


def _replay_gaps(model: Transformer, requests: Sequence[Request], completions: Sequence[Completion]) -> Tensor:
    """Return each token's recorded log-probability minus its replayed one."""
    pairs = zip(requests, completions, strict=True)
    gaps = [completion.commit_logp - replay(model, request, completion).logp for request, completion in pairs]
    return torch.from_numpy(np.concatenate(gaps))


def _share_of_same(some: Sequence[Completion], others: Sequence[Completion]) -> float:
    shares = [(one.token_ids == other.token_ids).mean() for one, other in zip(some, others, strict=True)]
    return float(np.mean(shares))
