"""FP8 linear layers, against products in float64 of the rounded and of the original numbers."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from learner.model.adapter import Adapter
from learner.model.config import TransformerConfig
from learner.model.elementwise import quantized_rows
from learner.model.lora import copy_sharing_base, set_adapter
from learner.model.networks import make_model
from learner.model.quantization import fp8
from learner.model.quantization.fp8 import Fp8Linear, quantize_to_fp8, scaled_product
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler


@pytest.fixture
def policy(config: TransformerConfig) -> Transformer:
    model = make_model(config.model_copy(update={"d_model": 64, "mlp_hidden_size": 96}))
    init_weights(model, 0, scale=2.0)
    return model.requires_grad_(False)


def _layer(dtype: torch.dtype) -> tuple[nn.Linear, Fp8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, dtype=dtype)
    in_fp8 = Fp8Linear(linear)
    with torch.no_grad():
        in_fp8.quantize()
    return linear, in_fp8


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def _dequantized(matrix: Tensor) -> Tensor:
    rounded, scales = quantized_rows(matrix)
    return rounded.double() * scales.double()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@torch.inference_mode()
def test_a_layer_multiplies_the_rounded_numbers(dtype: torch.dtype, most: float) -> None:
    linear, in_fp8 = _layer(dtype)
    # Rows of very different sizes: each has its own scale.
    x = (torch.randn(2, 5, 64) * torch.logspace(-4, 4, 5)[:, None]).to(dtype)
    found = in_fp8(x)
    assert found.dtype is dtype
    assert found.shape == (2, 5, 48)
    expected = _dequantized(x.flatten(0, 1)) @ _dequantized(linear.weight).T + linear.bias.double()
    for row in range(10):
        assert _distance(found.flatten(0, 1)[row], expected[row]) < most
    exact = x.double() @ linear.weight.double().T
    # e4m3 has four significant bits: a relative error of up to 1/16, half of it on average, in both factors.
    assert 0.01 < _distance(found - linear.bias, exact) < 0.06


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@torch.inference_mode()
def test_the_kernel_computes_what_cpus_do(dtype: torch.dtype, most: float) -> None:
    """PyTorch has the GPU's kernel for CPUs too; it is slow."""
    _, in_fp8 = _layer(dtype)
    x = torch.randn(5, 64, dtype=dtype)
    found = scaled_product(*_kernel_arguments(x, in_fp8), dtype)
    assert found.dtype is dtype
    assert _distance(found, in_fp8.product(x, torch.float32)) < most


def _kernel_arguments(x: Tensor, layer: Fp8Linear) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_e4m3, scales = quantized_rows(x)
    return x_e4m3, layer.quantized, scales, layer.scales


@torch.inference_mode()
def test_rows_of_zeros_and_no_rows() -> None:
    _, in_fp8 = _layer(torch.bfloat16)
    assert torch.equal(in_fp8(torch.zeros(1, 64, dtype=torch.bfloat16))[0], in_fp8.bias)
    assert in_fp8(torch.zeros(0, 64, dtype=torch.bfloat16)).shape == (0, 48)


def test_the_policy_keeps_its_parameters(policy: Transformer) -> None:
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    quantize_to_fp8(policy)
    after = policy.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@torch.inference_mode()
def test_new_weights_are_used_after_the_next_call(policy: Transformer) -> None:
    ids, other = torch.arange(10)[None], copy.deepcopy(policy)
    init_weights(other, 1, scale=2.0)
    quantize_to_fp8(policy)
    buffers = {name: buffer.data_ptr() for name, buffer in policy.named_buffers()}
    policy.load_state_dict(other.state_dict())
    quantize_to_fp8(policy)
    quantize_to_fp8(other)
    assert torch.equal(policy(ids), other(ids))
    assert {name: buffer.data_ptr() for name, buffer in policy.named_buffers()} == buffers


@torch.inference_mode()
def test_an_early_adapter_is_not_lost(policy: Transformer) -> None:
    """Its output is a fraction of the last bit of the layer's in bfloat16, and only the sum is rounded."""
    policy = policy.bfloat16()
    name, inputs, outputs = "blocks.0.mlp.up_proj", 64, 96
    matrices = {f"{name}.lora_A.weight": torch.randn(4, inputs), f"{name}.lora_B.weight": torch.randn(outputs, 4)}
    adapter = Adapter(rank=4, alpha=4, base="", matrices={key: 0.01 * value for key, value in matrices.items()})
    adapted = copy.deepcopy(policy)
    set_adapter(adapted, adapter.matrices, adapter.scaling)
    quantize_to_fp8(adapted)
    layer = adapted.get_submodule(name)
    x = torch.randn(200, inputs).bfloat16()
    base = layer.base_layer.product(x, torch.float32)
    expected = (base + (x.float() @ layer.lora_A.float().T) @ layer.lora_B.float().T).bfloat16()
    assert float((layer(x) == expected).float().mean()) > 0.99
    assert float((base.bfloat16() == expected).float().mean()) < 0.95


@torch.inference_mode()
def test_versions_with_other_adapters_share_the_rounded_weights(policy: Transformer) -> None:
    quantize_to_fp8(policy)
    pointers = {buffer.data_ptr() for buffer in policy.buffers()}
    assert {buffer.data_ptr() for buffer in copy_sharing_base(policy).buffers()} == pointers


@pytest.mark.parametrize("changes", [{}, {"cache": "dual"}, {"threshold": 0.5}])
def test_a_sampler_records_the_likelihoods_of_the_fp8_policy(policy: Transformer, changes: dict[str, object]) -> None:
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=1.0, **changes)
    requests = [Request(prompt_ids=(3, 4, 5 + seed), params=params, seed=seed) for seed in range(3)]
    in_fp8 = copy.deepcopy(policy)
    quantize_to_fp8(in_fp8)
    expected = Sampler(in_fp8, 0).generate(requests)
    for one, other in zip(Sampler(policy, 0, EngineConfig(fp8=True)).generate(requests), expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.commit_logp.tolist() == other.commit_logp.tolist()


def test_what_cannot_compute_in_fp8_is_refused(config: TransformerConfig, moe_config: TransformerConfig) -> None:
    engine = EngineConfig(fp8=True)
    narrow = make_model(config.model_copy(update={"mlp_hidden_size": 40}))
    with pytest.raises(ValueError, match="multiples of 16, and gate_proj maps 32 to 40: leave it out"):
        Sampler(narrow, 0, engine)
    assert "experts" in (engine.incompatibility(moe_config) or "")
    assert EngineConfig().incompatibility(moe_config) is None


def test_an_old_gpu_is_refused() -> None:
    with (
        patch("torch.cuda.get_device_capability", lambda _: (8, 0)),
        patch("torch.cuda.get_device_name", lambda _: "NVIDIA A100"),
        pytest.raises(ValueError, match=r"needs a GPU of compute capability 8.9 .*, and NVIDIA A100 has 8.0: leave"),
    ):
        fp8.check_device(torch.device("cuda"))
    fp8.check_device(torch.device("cpu"))
