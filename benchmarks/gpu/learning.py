"""GPU stages of the learner: update throughput, and the time to publish a version."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks import rounds
from benchmarks.gpu.setting import Row, Setting, random_policy, taken_s
from learner.estimators import SamplerFacts, Views, token_logps
from learner.hardware import free_unused_memory, peak_flop_per_s, peak_memory_bytes, reset_peak_memory
from learner.learner import Learner
from learner.model.lora import set_adapter
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.transformer import Transformer
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig

_NUM_GROUPS, _GROUP = 4, 8
"""Groups and completions per group. A group is a micro-batch: 4,096 slots of LLaDA's canvases."""


def learner(setting: Setting) -> Iterator[Row]:
    """Time updates of a LoRA adapter on the whole network, and of all weights of a network with fewer layers.

    Also times rows of unequal length, padded and concatenated, and updates that are fused or compiled.
    """
    adapter = LoraConfig(rank=setting.rank, alpha=64)
    few = setting.with_layers(setting.few_layers)
    yield _update(setting, adapter, ShardingConfig())
    yield _update(few, FULL_FINE_TUNING, ShardingConfig())
    yield _update(setting, adapter, ShardingConfig(compile="elementwise"))
    # An upper bound for GSM8K's prompts.
    yield from _ragged(replace(few, prompt_tokens=256))
    # Last, because its compile time is unknown.
    yield _update(few, FULL_FINE_TUNING, ShardingConfig(compile=True))
    yield _update(setting, adapter, ShardingConfig(compile=True))


def _ragged(setting: Setting) -> Iterator[Row]:
    """Time forward and backward of canvases with GSM8K's distribution of prompt lengths, all weights trained."""
    model = random_policy(setting, torch.bfloat16)
    of_round = rounds.Setting(shape=setting.shape, gen_length=setting.gen_length, num_groups=2, group_size=_GROUP)
    terms = rounds.ragged_terms(of_round, model.config)
    lengths = terms.views.lengths
    for concatenates_rows, name in ((False, "padded"), (True, "back to back")):
        views = replace(terms.views, concatenates_rows=concatenates_rows)
        seconds = taken_s(setting, partial(_forward_and_backward, model, views))
        yield {
            "what": f"a sweep of {len(lengths)} canvases of {lengths.min()} to {lengths.max()}, {name}",
            "seconds": seconds,
            "canvas_tokens_per_s": int(lengths.sum()) / seconds,
        }


def _forward_and_backward(model: Transformer, views: Views) -> None:
    token_logps(model, views).sum().backward()


def publishing(setting: Setting) -> Iterator[Row]:
    """Time a version of an adapter: gathered and checksummed on the host, then attached to a sampler's weights."""
    policy = ShardedPolicy(
        random_policy(setting, torch.bfloat16), None, lora=LoraConfig(rank=setting.rank, alpha=setting.rank)
    )
    gathered_s = taken_s(setting, policy.adapter_on_rank_0)
    adapter = policy.adapter_on_rank_0()
    yield {
        "what": f"adapter of rank {setting.rank}, to the host",
        "seconds": gathered_s,
        "megabytes": sum(tensor.nbytes for tensor in adapter.values()) / 1e6,
    }
    sums_s = taken_s(setting, lambda: [zlib.crc32(_as_bytes(tensor).numpy().data) for tensor in adapter.values()])
    yield {"what": "its checksums", "seconds": sums_s}
    sampled, scaling = random_policy(setting, torch.bfloat16), policy.lora.scaling
    loaded_s = taken_s(setting, lambda: set_adapter(sampled, adapter, scaling))
    yield {"what": "its loading on the device, from the host", "seconds": loaded_s}


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _update(setting: Setting, lora: LoraConfig, sharding: ShardingConfig) -> Row:
    of_round = rounds.Setting(
        shape=setting.shape,
        prompt_tokens=setting.prompt_tokens,
        gen_length=setting.gen_length,
        num_groups=_NUM_GROUPS,
        group_size=_GROUP,
        num_updates=2,
        device=setting.device,
    )
    model, device = random_policy(setting, torch.bfloat16), torch.device(setting.device)
    policy = ShardedPolicy(model, None, sharding, lora=lora)
    trained = Learner(policy, rounds.learner_config(of_round), SamplerFacts(has_reproducible_logps=False))
    batch = rounds.make_round(of_round)
    # The previous row may have left a policy in a reference cycle, which would count as used memory.
    free_unused_memory(device)
    reset_peak_memory(device)
    seconds = taken_s(setting, lambda: trained.update(batch, 0), rounds=1)
    stated = peak_flop_per_s(device)
    what = f"an adapter of rank {lora.rank}" if lora.rank else "every weight"
    way = {False: "eager", "elementwise": "fused", True: "compiled"}[sharding.compile]
    return {
        "what": f"two updates of {what}, {setting.shape.num_layers} layers, {batch.num_rows} canvases of "
        f"{setting.canvas_tokens}, {way}",
        "seconds": seconds,
        "canvas_tokens_per_s": 2 * batch.num_rows * setting.canvas_tokens / seconds,
        "tflop_per_s": trained.model_flops / seconds / 1e12,
        "mfu": stated and trained.model_flops / seconds / stated,
        "peak_gigabytes": peak_memory_bytes(device) / 1e9,
    }
