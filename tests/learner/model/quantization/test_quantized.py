"""Policies with frozen layers quantized to 4 bits (NF4) and an adapter on top (QLoRA)."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.adapter import Adapter
from learner.model.checkpoint import load_policy, load_weights, save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.lora import plain_name
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.quantization.nf4 import Nf4Linear, quantized_layers
from learner.model.storage import throughput
from learner.model.tokenizer import make_tokenizer
from learner.model.transformer import Transformer
from learner.parallel.loading import load_by_rows
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from tests.learner.policies import perturbed_policy
from tests.ranks import run_ranks

with warnings.catch_warnings():
    # It uses a deprecated feature of torch.
    warnings.simplefilter("ignore", DeprecationWarning)
    pytest.importorskip("bitsandbytes", reason="needs the extra d1[quantized]")

RL = LearnerConfig(num_rounds=2, group_size=4, groups_per_round=3, inner_updates=2, lr=1e-2, max_grad_norm=1e9)
LORA = LoraConfig(rank=4, alpha=8, targets=("q_proj", "down_proj"), base_weights="nf4")
CPU = torch.device("cpu")
IDS = torch.arange(36).view(3, 12)


def _policy(base: Transformer, *, on_ranks: bool = False, sharding: ShardingConfig | None = None) -> ShardedPolicy:
    mesh = make_mesh("cpu") if on_ranks else None
    return ShardedPolicy(copy.deepcopy(base), mesh, sharding or ShardingConfig(), lora=LORA, seed=7)


def _save(base: Transformer, directory: Path) -> None:
    make_tokenizer(["1 2 3"], directory.parent, 300)
    save_checkpoint(directory, base.config, dict(base.named_parameters()), directory.parent)


def _plain(policy: ShardedPolicy) -> Transformer:
    """Return an unquantized model with the policy's full weights."""
    model = make_model(policy.config)
    model.load_state_dict(policy.full_weights())
    return model


@torch.no_grad()
def _logits(model: torch.nn.Module) -> Tensor:
    return model(IDS)


def _bytes_of_blocks(policy: ShardedPolicy) -> int:
    return sum(t.nbytes for _, layer in quantized_layers(policy.module) for t in (layer.packed, layer.scales))


def test_a_layer_computes_with_its_dequantized_weight() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 80)
    layer, x = Nf4Linear(linear, CPU), torch.randn(5, 96, requires_grad=True)
    weight = layer.weight_as(torch.float32)
    torch.testing.assert_close(layer(x), x @ weight.T + linear.bias, atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x)
    (expected,) = torch.autograd.grad((x @ weight.T + linear.bias).square().sum(), x)
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=0)


def test_nf4_rounds_to_the_nearest_of_sixteen_scaled_values() -> None:
    """Computed by hand, with the values of appendix E of QLoRA."""
    values = [-1, -0.6961928, -0.5250731, -0.39491749, -0.28444138, -0.18477343, -0.09105003, 0]
    values += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
    linear = torch.nn.Linear(64, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    found = Nf4Linear(linear, CPU).weight_as(torch.float32)
    for row, rounded in zip(linear.weight.tolist(), found.tolist(), strict=True):
        scale = max(map(abs, row))
        assert rounded == pytest.approx([scale * min(values, key=lambda v: abs(v - w / scale)) for w in row], abs=1e-5)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sampler_in_another_precision_has_the_learners_weights(
    base: Transformer, tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """The checkpoint's weights are quantized to 4 bits first, and cast afterwards."""
    save_checkpoint(tmp_path / "initial", base.config, base.to(stored).state_dict(), tmp_path)
    learner = ShardedPolicy(load_weights(tmp_path / "initial"), None, lora=LORA, seed=7)
    matrices = learner.adapter_on_rank_0()
    adapter = Adapter(rank=4, alpha=8, base="initial", base_weights="nf4", matrices=matrices)
    save_checkpoint(tmp_path / "sft", base.config, None, tmp_path, adapter=adapter)
    sampled = load_policy(tmp_path / "sft", dtype)
    held = {plain_name(name): parameter for name, parameter in sampled.named_parameters()}
    for name, layer in quantized_layers(learner.module):
        assert torch.equal(held[plain_name(f"{name}.weight")], layer.weight_as(dtype)), name


def test_nf4_without_bitsandbytes_is_refused(base: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"nf4 needs the package bitsandbytes; pip install 'd1\[quantized\]'"):
        _policy(base)


def test_quantization_is_idempotent(base: Transformer) -> None:
    policy = _policy(base)
    weights = policy.full_weights()
    assert any(not torch.equal(weight, base.state_dict()[name]) for name, weight in weights.items())
    policy.load_full_weights(weights)
    assert [name for name, weight in policy.full_weights().items() if not torch.equal(weight, weights[name])] == []
    with torch.no_grad():
        base.blocks[0].mlp.up_proj.weight.zero_()
    again = _policy(base).full_weights()
    assert torch.equal(again["blocks.0.mlp.up_proj.weight"], torch.zeros(48, 32))


def test_loaded_weights_are_quantized(base: Transformer) -> None:
    policy, other = _policy(base), copy.deepcopy(base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.7).add_(0.01)
    policy.load_full_weights(dict(other.named_parameters()))
    expected = _policy(other).full_weights()
    assert [name for name, weight in policy.full_weights().items() if not torch.equal(weight, expected[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_quantized_tensor_by_tensor_while_reading(
    base: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Bit-identical to quantizing a complete policy. Besides the current tensor, only the 4-bit weights take memory."""
    _save(base.to(dtype), tmp_path / "it")
    expected = _policy(base.float()).full_weights()
    held, load = [], Nf4Linear.load

    def counting(layer: Nf4Linear, weight_OI: Tensor, device: torch.device) -> None:
        # By type: some torch objects warn when their class is read, and meta tensors have no memory.
        tensors = (
            found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter) and not found.is_meta
        )
        sizes = {found.untyped_storage().data_ptr(): found.untyped_storage().nbytes() for found in tensors}
        held.append(sum(sizes.values()) - weight_OI.nbytes)
        load(layer, weight_OI, device)

    monkeypatch.setattr(Nf4Linear, "load", counting)
    said: list[str] = []
    monkeypatch.setattr(throughput, "_EVERY_S", 0.0)
    # Existing objects need not be searched for each tensor.
    gc.freeze()
    policy = load_by_rows(tmp_path / "it", None, ShardingConfig(), device=CPU, lora=LORA, seed=7, report=said.append)
    assert len(held) == 2 * 7
    assert held[-1] - held[0] <= _bytes_of_blocks(policy) + 14 * 16 * 4, "the 4 bits of all but one, and their values"
    assert {line.split(":")[0] for line in said} == {"loading it"}
    assert len(said) > 2 * 7
    loaded = policy.full_weights()
    assert loaded.keys() == expected.keys()
    assert [name for name, weight in loaded.items() if not torch.equal(weight, expected[name])] == []


def test_only_linear_layers_of_blocks_are_quantized(base: Transformer) -> None:
    policy, whole = _policy(base), base.state_dict()
    rounded = {name for name, weight in policy.full_weights().items() if not torch.equal(weight, whole[name])}
    assert rounded == {name for name in whole if name.startswith("blocks.") and name.endswith("proj.weight")}
    assert policy.full_weights().keys() == whole.keys()
    # 4.5 of 32 bits.
    assert _bytes_of_blocks(policy) == sum(whole[name].nbytes for name in rounded) * 4.5 / 32


def test_the_sampler_has_the_logits_of_the_learner(base: Transformer, rollouts: RolloutBatch) -> None:
    policy = _policy(base)
    torch.testing.assert_close(_logits(_plain(policy)), _logits(policy.module), atol=1e-5, rtol=1e-5)
    Learner(policy, RL).update(rollouts, 0)
    torch.testing.assert_close(_logits(_plain(policy)), _logits(policy.module), atol=2e-5, rtol=1e-5)


def test_training_on_nf4_equals_training_on_dequantized_weights(base: Transformer, rollouts: RolloutBatch) -> None:
    """A round on the 4-bit weights equals a round on their dequantized values."""
    policy = _policy(base)
    start = policy.full_weights()
    whole = ShardedPolicy(_plain(policy), None, lora=LORA.model_copy(update={"base_weights": "full"}), seed=7)
    metrics, expected = (Learner(learned, RL).update(rollouts, 0) for learned in (policy, whole))
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for name, matrix in whole.adapter_on_rank_0().items():
        torch.testing.assert_close(policy.adapter_on_rank_0()[name], matrix, atol=1e-3, rtol=1e-3)
        assert matrix.abs().max() > 0
    policy.load_adapter({name: matrix * 0 for name, matrix in policy.adapter_on_rank_0().items()})
    assert [name for name, weight in policy.full_weights().items() if not torch.equal(weight, start[name])] == []


def test_nf4_needs_an_adapter() -> None:
    with pytest.raises(ValidationError, match="base_weights nf4 cannot be trained, only an adapter beside them"):
        LoraConfig(base_weights="nf4")


def _rank(
    rank: int, port_file: str, config: TransformerConfig, checkpoint: Path, batch: RolloutBatch, out: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    read = load_by_rows(checkpoint, make_mesh("cpu"), ShardingConfig(), device=CPU, lora=LORA, seed=7)
    found = _trained(read, batch)
    half = _policy(perturbed_policy(config), on_ranks=True, sharding=ShardingConfig(compute_dtype="bfloat16"))
    found["half"] = Learner(half, RL).update(batch, 0)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def _trained(policy: ShardedPolicy, batch: RolloutBatch) -> dict[str, Any]:
    metrics = Learner(policy, RL).update(batch, 0)
    return {"weights": policy.full_weights(), "adapter": policy.adapter_on_rank_0(), "metrics": metrics}


def test_two_ranks_equal_one_process(config: TransformerConfig, rollouts: RolloutBatch, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    _save(perturbed_policy(config), tmp_path / "it")
    run_ranks(_rank, str(tmp_path / "at"), config, tmp_path / "it", rollouts, out, num=2)
    sharded, single = torch.load(out, weights_only=True), _trained(_policy(perturbed_policy(config)), rollouts)
    assert sharded["metrics"] == pytest.approx(single["metrics"], rel=1e-3, abs=1e-5)
    for part in ("weights", "adapter"):
        assert sharded[part].keys() == single[part].keys()
        for name, tensor in single[part].items():
            # A tenth of a step.
            torch.testing.assert_close(sharded[part][name], tensor, atol=1e-3, rtol=1e-3, msg=name)
    assert sharded["half"]["loss"] == pytest.approx(single["metrics"]["loss"], rel=0.1, abs=0.02)
    assert sharded["half"]["grad_norm"] == pytest.approx(single["metrics"]["grad_norm"], rel=0.1)
