"""LoRA: a fresh adapter leaves the policy unchanged, and a merged one computes the same policy."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from learner.algorithms import ALGORITHMS
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, token_logps
from learner.learner import Learner
from learner.model.adapter import Adapter, attach_adapters, combine_adapters
from learner.model.config import TransformerConfig
from learner.model.lora import (
    AdaptedLinear,
    adapted_layers,
    copy_sharing_base,
    is_adapter,
    merge_adapters,
    plain_name,
    set_adapter,
)
from learner.model.lora_config import TARGETS, LoraConfig
from learner.model.networks import make_model
from learner.model.transformer import Block, Transformer, init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round, scored_logps
from tests.learner.methods.test_algorithms import algorithm_config, algorithm_sampler

RL = LearnerConfig(num_rounds=2, group_size=4, groups_per_round=3, inner_updates=2, lr=1e-2, max_grad_norm=1e9)
LORA = LoraConfig(rank=4, alpha=8)
IDS = torch.arange(36).view(3, 12)


def _with_adapter(base: Transformer, lora: LoraConfig = LORA) -> ShardedPolicy:
    return ShardedPolicy(copy.deepcopy(base), None, lora=lora, seed=7)


@torch.no_grad()
def _logits(model: torch.nn.Module) -> Tensor:
    return model(IDS)


def test_a_fresh_adapter_changes_nothing(base: Transformer) -> None:
    policy = _with_adapter(base)
    assert torch.equal(_logits(policy.module), _logits(base))
    assert all(torch.equal(weight, base.state_dict()[name]) for name, weight in policy.full_weights().items())
    assert policy.full_weights().keys() == base.state_dict().keys()


def test_a_trained_policy_without_its_adapter_equals_the_base(base: Transformer, rollouts: RolloutBatch) -> None:
    policy = _with_adapter(base)
    Learner(policy, RL).update(rollouts, 0)
    assert not torch.allclose(_logits(policy.module), _logits(base), atol=1e-2)
    with policy.disable_adapters():
        assert torch.equal(_logits(policy.module), _logits(base))
    assert not torch.allclose(_logits(policy.module), _logits(base), atol=1e-2)


def test_only_the_adapter_is_trained(base: Transformer, rollouts: RolloutBatch) -> None:
    policy = _with_adapter(base)
    learner = Learner(policy, RL)
    learner.update(rollouts, 0)
    policy.module(IDS).sum().backward()
    have_gradients = {name for name, parameter in policy.module.named_parameters() if parameter.grad is not None}
    assert len(have_gradients) == 2 * len(TARGETS) * base.config.num_layers
    assert all(".lora_" in name for name in have_gradients)
    # LLaDA names both a block layer and the head `ff_out`; only the former is adapted.
    assert all(name.startswith("blocks.") for name in have_gradients)
    stepped = {name.split("/")[1] for name in learner.full_state()}
    assert stepped == policy.adapter_on_rank_0().keys() == policy.trained_parameters.keys()
    policy.load_adapter({name: tensor * 0 for name, tensor in policy.adapter_on_rank_0().items()})
    assert all(torch.equal(weight, base.state_dict()[name]) for name, weight in policy.full_weights().items())


def test_the_sampler_has_the_logits_of_the_learner(base: Transformer, rollouts: RolloutBatch) -> None:
    """Bit-identical: the same product and the same weights. Merged weights are equal up to float rounding."""
    policy, sampled = _with_adapter(base), copy.deepcopy(base)
    Learner(policy, RL).update(rollouts, 0)
    set_adapter(sampled, policy.adapter_on_rank_0(), LORA.scaling)
    assert torch.equal(_logits(sampled), _logits(policy.module))
    exact = copy.deepcopy(policy)
    exact.module.double()
    merged = make_model(base.config).double()
    merged.load_state_dict(exact.full_weights())
    torch.testing.assert_close(_logits(merged), _logits(exact.module), atol=1e-6, rtol=0)


def test_merged_weights_equal_pefts(base: Transformer, rollouts: RolloutBatch) -> None:
    from peft.tuners.lora import LoraLayer

    policy = _with_adapter(base, LoraConfig(rank=3, alpha=7, targets=("v_proj", "down_proj")))
    Learner(policy, RL).update(rollouts, 0)
    ours, theirs = policy.full_weights(), _as_peft(policy.module)
    layers = {name: module for name, module in theirs.named_modules() if isinstance(module, LoraLayer)}
    assert len(layers) == 2 * base.config.num_layers
    for name, layer in layers.items():
        layer.merge()
        torch.testing.assert_close(ours[f"{name}.weight"], layer.get_base_layer().weight)


def test_the_kl_reference_is_the_base_without_a_copy(base: Transformer, rollouts: RolloutBatch) -> None:
    policy = _with_adapter(base)
    learner = Learner(policy, RL)
    assert learner.reference is None
    learner.update(rollouts, 0)
    plan = Round(policy, RL, SamplerFacts(), rollouts).plan(0)
    with torch.no_grad():
        expected = torch.cat([token_logps(base, micro.views) for micro in plan.micro_batches])
    reference = learner._reference_logps(plan)
    assert reference is not None
    assert torch.equal(reference, expected)
    assert learner.update(rollouts, 1)["kl"] > 1e-4


def test_an_adapter_round_trips(base: Transformer, rollouts: RolloutBatch) -> None:
    policy, other = _with_adapter(base), _with_adapter(base)
    Learner(policy, RL).update(rollouts, 0)
    other.load_adapter(policy.adapter_on_rank_0())
    assert torch.equal(_logits(other.module), _logits(policy.module))


def test_loading_full_weights_resets_the_adapter(base: Transformer, rollouts: RolloutBatch) -> None:
    policy = _with_adapter(base)
    first = policy.adapter_on_rank_0()
    Learner(policy, RL).update(rollouts, 0)
    weights = policy.full_weights()
    policy.load_full_weights(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.full_weights().items())
    assert all(torch.equal(tensor, first[name]) for name, tensor in policy.adapter_on_rank_0().items())


def test_the_seed_fixes_the_adapter(base: Transformer) -> None:
    first, same, other = (
        ShardedPolicy(copy.deepcopy(base), None, lora=LORA, seed=seed).adapter_on_rank_0() for seed in (1, 1, 2)
    )
    name = "blocks.1.mlp.down_proj.lora_A.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    # Initialized as in peft: uniform in ±1 / sqrt(inputs).
    assert 0.9 * 48**-0.5 < float(first[name].abs().max()) <= 48**-0.5


@pytest.mark.parametrize(
    ("targets", "what"),
    [(("q_proj", "ff_out"), "it names ff_out, which no block has"), ((), "it is empty")],
)
def test_unknown_targets_are_refused_with_the_known_ones(targets: tuple[str, ...], what: str) -> None:
    with pytest.raises(ValidationError) as refused:
        LoraConfig(rank=4, targets=targets)
    assert f"{what}; the linear layers of a block are q_proj, k_proj, v_proj, out_proj, gate_proj" in str(refused.value)


def test_the_targets_are_the_linear_layers_of_a_block(base: Transformer) -> None:
    linear = {
        name.rpartition(".")[2] for name, part in base.blocks[0].named_modules() if isinstance(part, torch.nn.Linear)
    }
    assert linear == set(TARGETS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_only_the_adapter(name: str, policy: Transformer, rollouts: RolloutBatch) -> None:
    config, sampler = algorithm_config(name), algorithm_sampler(name)
    adapted = _with_adapter(policy)
    start, adapter = adapted.full_weights(), adapted.adapter_on_rank_0()
    on_base, on_adapted = (Round(on, config, sampler, rollouts) for on in (ShardedPolicy(policy, None), adapted))
    for index in range(config.inner_updates):
        theirs, ours = on_base.plan(index), on_adapted.plan(index)
        expected = scored_logps(ShardedPolicy(policy, None), theirs)
        assert torch.equal(scored_logps(adapted, ours), expected)
        assert expected.abs().max() > 0
    learner = Learner(adapted, config, sampler)
    assert learner.reference is None
    learner.update(rollouts, 0)
    frozen = {plain_name(n): p for n, p in adapted.module.named_parameters() if not is_adapter(plain_name(n))}
    assert [n for n, p in frozen.items() if not torch.equal(p, start[n]) or p.grad is not None] == []
    assert frozen.keys() == start.keys()
    moved = adapted.adapter_on_rank_0()
    assert [n for n in adapter if torch.equal(moved[n], adapter[n])] == []


class Passes(TorchDispatchMode):
    """Counts elementwise kernels, including copies, and the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags or func._opname in ("copy_", "clone", "_to_copy"):
            self.kernels[func._opname.removesuffix("_")] += 1
            self.num_bytes += sum(part.nbytes for part in (*args, found) if isinstance(part, Tensor))
        return found


def _trained(base: Transformer) -> Block:
    """Return a block with a trained adapter."""
    policy = _with_adapter(base)
    policy.load_adapter({name: torch.randn_like(matrix) for name, matrix in policy.adapter_on_rank_0().items()})
    return policy.module.blocks[0]


def _as_peft(module: Any) -> Any:
    """Return a copy that uses peft's layers."""
    from peft import LoraConfig as PeftConfig
    from peft.tuners.lora import Linear

    theirs = nn.Sequential(copy.deepcopy(module))
    for name, layer in list(theirs.named_modules()):
        if isinstance(layer, AdaptedLinear):
            rank = len(layer.lora_A)
            alpha = round(layer.scaling * rank)
            config = PeftConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0)
            made = Linear(layer.base_layer, "default", config, r=rank, lora_alpha=alpha)
            assert made.scaling["default"] == layer.scaling
            made.lora_A["default"].weight, made.lora_B["default"].weight = layer.lora_A, layer.lora_B
            theirs.set_submodule(name, made)
    return theirs[0]


def _run(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return a layer's output, and its gradients by the input and the adapter."""
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    adapter = [parameter for name, parameter in layer.named_parameters() if "lora_" in name]
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *adapter])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 32), (7, 32)], ids=["rows", "slots"])
def test_a_layer_and_its_gradients_equal_pefts(base: Transformer, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, is_half = _trained(base).attn.q_proj, dtype is torch.bfloat16
    layer.base_layer.to(dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    ours, theirs = (_run(module, x) for module in (layer, _as_peft(layer)))
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    for our, their in zip(ours, theirs, strict=True):
        # Of bfloat16's eight significant bits, the largest of many sums may lose two.
        atol = (0.03 if is_half else 1e-6) * float(their.abs().max())
        torch.testing.assert_close(our, their, atol=atol, rtol=0)


def _passes(model: Transformer) -> Passes:
    """Count a forward and a backward through every block."""
    with Passes() as passes:
        model(IDS).sum().backward()
    model.zero_grad()
    return passes


def test_an_adapter_adds_no_pass_over_activations(base: Transformer) -> None:
    """No scaling, sum or copy, forward or backward, beyond those of the blocks without an adapter.

    A bias takes a separate pass, with the adapter or without.
    """
    policy = _with_adapter(base)
    # Backpropagate through every block, with the adapter and without it.
    policy.module.embed.weight.requires_grad_()
    ours, pefts = _passes(policy.module), _passes(_as_peft(policy.module))
    with policy.disable_adapters():
        without = _passes(policy.module)
    assert ours.kernels == without.kernels
    assert ours.num_bytes == without.num_bytes
    # Per layer: B A x is scaled and added, its gradient is scaled, and the gradient by x is added.
    num_layers, num_biased = len(TARGETS) * base.config.num_layers, 3 * base.config.num_layers * base.config.qkv_bias
    assert pefts.kernels - ours.kernels == {"mul": 2 * num_layers, "add": 2 * num_layers - num_biased}
    assert pefts.num_bytes > 1.1 * ours.num_bytes


def _stage(base: Transformer, seed: int, scale: float = 1.0) -> Adapter:
    """Return the adapter that a stage has trained."""
    shapes = {name: matrix.shape for name, matrix in _with_adapter(base).adapter_on_rank_0().items()}
    generator = torch.Generator().manual_seed(seed)
    matrices = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return Adapter(rank=LORA.rank, alpha=LORA.alpha, base="initial", matrices=matrices)


def test_a_stage_trains_on_top_of_earlier_adapters(base: Transformer, rollouts: RolloutBatch) -> None:
    """The same function, gradients and reference as on weights with the earlier stage merged."""
    earlier = _stage(base, 1, 0.1)
    policy, on_merged = _with_adapter(base), copy.deepcopy(base)
    policy.reset_adapter(earlier)
    set_adapter(on_merged, earlier.matrices, earlier.scaling)
    merge_adapters(on_merged)
    torch.testing.assert_close(_logits(policy.module), _logits(on_merged), atol=1e-4, rtol=1e-4)
    merged = _with_adapter(on_merged)
    ours, theirs = (Learner(one, RL).update(rollouts, 0) for one in (policy, merged))
    assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-4)
    for name, matrix in merged.adapter_on_rank_0().items():
        torch.testing.assert_close(policy.adapter_on_rank_0()[name], matrix, atol=2e-3, rtol=1e-2)
    with policy.disable_adapters():
        torch.testing.assert_close(_logits(policy.module), _logits(on_merged), atol=1e-4, rtol=1e-4)
    for name, weight in merged.full_weights().items():
        torch.testing.assert_close(policy.full_weights()[name], weight, atol=2e-3, rtol=1e-2)
    policy.reset_adapter()
    assert torch.equal(_logits(policy.module), _logits(base))


def test_gradients_equal_autograd_on_the_explicit_sum(base: Transformer) -> None:
    """Compared with autograd on the explicit sum, with both adapters, and with the trained one off."""
    layer = _trained(base).attn.q_proj
    layer.set_start_adapter(torch.randn(3, 32), torch.randn(32, 3), 0.5)
    for is_disabled in (False, True):
        layer.is_disabled = is_disabled
        x = torch.randn(5, 32, requires_grad=True)
        plain = layer.base_layer(x) + 0.5 * x @ layer.start_A.T @ layer.start_B.T
        wanted = [x] if is_disabled else [x, layer.lora_A, layer.lora_B]
        plain = plain if is_disabled else plain + layer.scaling * x @ layer.lora_A.T @ layer.lora_B.T
        product = layer(x)
        torch.testing.assert_close(product, plain, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            assert torch.equal(layer(x), product), "the same bits without gradients"
        ours, theirs = (torch.autograd.grad(y.square().sum(), wanted) for y in (product, plain))
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, atol=1e-2, rtol=1e-4)


def test_adapters_of_several_stages_combine_into_one(base: Transformer) -> None:
    stages = [_stage(base, 1, 0.1), replace(_stage(base, 2, 0.1), alpha=3)]
    together, summed = combine_adapters(stages), copy.deepcopy(base)
    assert together is not None
    assert (together.rank, combine_adapters([])) == (8, None)
    for stage in stages:
        set_adapter(summed, stage.matrices, stage.scaling)
        merge_adapters(summed)
    one = copy.deepcopy(base)
    set_adapter(one, together.matrices, together.scaling)
    merge_adapters(one)
    for name, weight in summed.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], weight, atol=1e-5, rtol=1e-5)


def test_policies_with_a_shared_base_have_separate_adapters(base: Transformer) -> None:
    first = copy.deepcopy(base)
    attach_adapters(first, _stage(base, 1).matrices, 2.0, _stage(base, 2))
    expected = _logits(first)
    second = copy_sharing_base(first)
    set_adapter(second, _stage(base, 3).matrices, 2.0)
    assert torch.equal(_logits(first), expected)
    assert not torch.allclose(_logits(second), expected)
    alone = copy.deepcopy(base)
    attach_adapters(alone, _stage(base, 3).matrices, 2.0, _stage(base, 2))
    assert torch.equal(_logits(second), _logits(alone))
    # Only the trained matrices exist twice.
    ours, theirs = (
        {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())} for model in (first, second)
    )
    assert len(theirs - ours) == 2 * len(adapted_layers(first))


def test_small_adapter_updates_survive_bfloat16_unless_merged() -> None:
    """At the sizes of the first d1: lr 3e-6, twelve updates a round, scale 1/2, weights of 0.02.

    A share is the regression slope of a change in log-probability since the stage began on the change in float32.
    """
    config = TransformerConfig(
        family="llada",
        vocab_size=500,
        d_model=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        mlp_hidden_size=768,
        max_sequence_length=64,
        mask_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    generator = torch.Generator().manual_seed(0)
    base = make_model(config)
    for parameter in base.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.02, generator=generator)
    base = base.bfloat16()
    lora = LoraConfig(rank=32, alpha=16)
    learned, exact = _with_adapter(base, lora), _with_adapter(copy.deepcopy(base).float(), lora)
    ids = torch.randint(2, 500, (4, 48), generator=generator).index_fill(1, torch.arange(24, 48), 0)
    tokens = torch.randint(2, 500, (4, 24, 1), generator=generator)

    def logps(model: nn.Module) -> Tensor:
        return model(ids)[:, 24:].float().log_softmax(-1).gather(-1, tokens).double().flatten()

    # Steps of equal size along the gradient's sign, as an optimizer takes.
    gradients = torch.autograd.grad(logps(exact.module).sum(), list(exact.trained_parameters.values()))
    steps = {
        name: 12 * 3e-6 * gradient.sign() for name, gradient in zip(exact.trained_parameters, gradients, strict=True)
    }
    adapter, sampled = learned.adapter_on_rank_0(), copy.deepcopy(base)
    with torch.no_grad():
        start, exact_start = logps(base), logps(exact.module)
        for _ in range(5):
            adapter = {name: matrix + steps[name] for name, matrix in adapter.items()}
            learned.load_adapter(adapter)
            exact.load_adapter(adapter)
            set_adapter(sampled, adapter, lora.scaling)
            merged = copy.deepcopy(base).float()
            set_adapter(merged, adapter, lora.scaling)
            merge_adapters(merged)
            change = logps(exact.module) - exact_start
            shares = [
                float((logps(model) - start) @ change / (change @ change))
                for model in (learned.module, sampled, merged.bfloat16())
            ]
            assert shares[0] == pytest.approx(1, abs=0.05)
            assert shares[1] >= 0.9 * shares[0]
            assert shares[2] < 0.6, "what is lost otherwise"


def test_only_the_shared_expert_has_adapters(moe_config: TransformerConfig, rollouts: RolloutBatch) -> None:
    model = make_model(moe_config)
    init_weights(model, seed=0)
    policy = _with_adapter(model)
    assert torch.equal(_logits(policy.module), _logits(model))
    there = {name.rpartition(".lora_")[0] for name in policy.adapter_on_rank_0()}
    expected = {f"blocks.{layer}.attn.{name}" for layer in (0, 1) for name in TARGETS[:4]}
    expected |= {f"blocks.{part}.{name}" for part in ("0.mlp", "1.mlp.shared") for name in TARGETS[4:]}
    assert there == expected
    Learner(policy, RL).update(rollouts, 0)
    start, trained = model.state_dict(), policy.full_weights()
    moved = {name.removesuffix(".weight") for name, weight in trained.items() if not torch.equal(weight, start[name])}
    assert moved == expected
    merged = make_model(moe_config)
    merged.load_state_dict(trained)
    torch.testing.assert_close(_logits(merged), _logits(policy.module), atol=1e-4, rtol=1e-4)


def test_targets_that_experts_lack_are_refused(moe_config: TransformerConfig) -> None:
    moe = {"num_experts": 8, "experts_per_token": 3, "expert_width": 16, "router": "softmax"}
    bare = TransformerConfig(**moe_config.model_dump() | {"family": "sdar_moe", "moe": moe})
    lora = LoraConfig(rank=4, targets=("up_proj", "down_proj"))
    with pytest.raises(ValueError, match="targets") as refused:
        _with_adapter(make_model(bare), lora)
    assert str(refused.value) == (
        "model.lora.targets names up_proj, down_proj, and experts have no adapters; the linear layers of this policy "
        "are q_proj, k_proj, v_proj, out_proj"
    )
    assert lora.incompatibility(moe_config) is None
    assert LoraConfig(rank=4).incompatibility(bare) is None
    assert LoraConfig(targets=("up_proj",)).incompatibility(bare) is None
    nf4 = LoraConfig(rank=4, base_weights="nf4")
    with pytest.raises(ValueError, match="holds linear layers in 4 bits, and experts, most of the policy, are none"):
        _with_adapter(make_model(moe_config), nf4)
