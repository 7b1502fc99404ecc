"""FLOP counts of an update against PyTorch's FlopCounterMode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from learner import hardware
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, Views
from learner.flops import CanvasSums, forward_flops, update_flops
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round


def _config(**changes: object) -> LearnerConfig:
    settings = {"num_rounds": 1, "group_size": 4, "groups_per_round": 3, "lr": 1e-3}
    return LearnerConfig.model_validate(settings | changes)


def _even(batch: RolloutBatch) -> RolloutBatch:
    """Set equal lengths of prompts and texts: PyTorch would count padding too."""
    batch.prompt_lengths.fill_(6)
    batch.completion_lengths.fill_(8)
    return batch


def _first_blocks_spare(model: Transformer, lora: LoraConfig, num_tokens: int) -> float:
    """Return the FLOPs that the first block saves under LoRA: the gradients by its input."""
    width, key_value = model.config.d_model, model.config.num_kv_heads * model.config.head_dim
    # The frozen q, k and v, and the A of their adapters.
    return 2.0 * num_tokens * (width * (width + 2 * key_value) + 3 * width * lora.rank)


def test_a_value_models_flops_count(
    policy: Transformer, rollouts: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predictions at the start of the round, and an update beside each of the policy's."""
    monkeypatch.setattr("learner.learner.mask_variance", lambda *_: {})
    config = _config(algorithm="cj-grpo", value={}, inner_updates=2, estimator={"steps_per_segment": 4})
    learner = Learner(ShardedPolicy(policy, None), config, SamplerFacts(has_reproducible_logps=False))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        learner.update(_even(rollouts), 0)
    assert learner.model_flops == pytest.approx(float(counter.get_total_flops()), rel=1e-12)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)], ids=["whole", "adapter"])
def test_the_flops_of_an_update_equal_pytorchs_count(
    policy: Transformer, rollouts: RolloutBatch, lora: LoraConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three inner updates with different masks, each with forwards of the policy, the old policy and the reference."""
    batch, config, sampler = _even(rollouts), _config(inner_updates=3), SamplerFacts(has_reproducible_logps=False)
    monkeypatch.setattr("learner.learner.mask_variance", lambda *_: {})
    sharded = ShardedPolicy(copy.deepcopy(policy), None, lora=lora)
    learner, work = Learner(sharded, config, sampler), Round(sharded, config, sampler, batch)
    # PyTorch does not count the CPU's fused kernels.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        learner.update(batch, 0)
    counted = float(counter.get_total_flops())
    if lora.rank:
        num_tokens = sum(work.plan(index).canvases.tokens for index in range(3))
        counted += _first_blocks_spare(policy, lora, num_tokens)
    assert learner.model_flops == pytest.approx(counted, rel=1e-12)


def test_only_routed_experts_count(
    moe_config: TransformerConfig, rollouts: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the router, the shared expert and their sum; in a dense block and in a sparse one."""
    monkeypatch.setattr("learner.learner.mask_variance", lambda *_: {})
    model = make_model(moe_config)
    init_weights(model, seed=0)
    learner = Learner(ShardedPolicy(model, None), _config(inner_updates=3), SamplerFacts(has_reproducible_logps=False))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        learner.update(_even(rollouts), 0)
    assert learner.model_flops == pytest.approx(float(counter.get_total_flops()), rel=1e-12)


def test_padding_and_idle_micro_batches_do_not_count(policy: Transformer, rollouts: RolloutBatch) -> None:
    flops = []
    for max_tokens in (10**6, 40):
        learner = Learner(ShardedPolicy(copy.deepcopy(policy), None), _config(micro_batch_tokens=max_tokens))
        learner.update(rollouts, 0)
        flops.append(learner.model_flops)
    assert flops[0] == flops[1] > 0


def test_forward_flops_depend_on_length_and_scored_slots(policy: Transformer) -> None:
    """By hand, for two layers: one canvas of 5 slots, 2 of them scored."""
    config = policy.config  # d_model 32, key-value width 16, feed-forward 48, vocabulary 40.
    canvases = CanvasSums(tokens=5, pairs=25, queries=2, query_pairs=10, scored=2)
    found = forward_flops(config, LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj")), canvases)
    feed_forward = 3 * 32 * 48
    assert found.layers == 2 * (5 * (2 * 32 * 32 + 2 * 32 * 16 + feed_forward)) + 2 * (
        5 * 2 * 32 * 16 + 2 * (2 * 32 * 32 + feed_forward)
    )
    assert found.attention == 2 * 2 * 32 * (25 + 10)
    assert found.head == 2 * 2 * 32 * 40
    assert found.adapter == 2 * 4 * ((5 + 2) * 64 + (5 + 5) * 48 + (5 + 2) * 80)
    assert update_flops(config, LoraConfig(), canvases) == 3 * (found.total - found.adapter)


def test_only_known_devices_have_a_peak_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.peak_flop_per_s(torch.device("cpu")) is None
    for name, rate in {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA GH200 480GB": None,
        "NVIDIA GeForce RTX 4090": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert hardware.peak_flop_per_s(torch.device("cuda", 0)) == rate


def test_peak_memory_grows_with_touched_memory() -> None:
    cpu = torch.device("cpu")
    before = hardware.peak_memory_bytes(cpu)
    held = torch.ones(before // 4 + 25_000_000)
    after = hardware.peak_memory_bytes(cpu)
    assert 100e6 <= after - before < 2 * held.nbytes


def test_canvas_sums_follow_lengths_and_scored_slots() -> None:
    """Two completions: a canvas of 3 slots in a row of 6, 2 of them scored, and a canvas of 6 slots with 1 scored."""
    views = Views(
        ids=torch.zeros(2, 6, dtype=torch.int64),
        lengths=torch.tensor([3, 6]),
        slots=torch.tensor([1, 2, 9]),
        scored=torch.tensor([0, 1, 2, 2]),
        targets=torch.zeros(4, dtype=torch.int64),
    )
    assert CanvasSums.of(views) == CanvasSums(tokens=9, pairs=9 + 36, queries=3, query_pairs=2 * 3 + 6, scored=3)
