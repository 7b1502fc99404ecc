"""Elementwise functions, plain and compiled, against float64; policies that call compiled ones equal plain policies.

Graphs are captured and then run eagerly. The nightly tests compile them for this machine.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor.utils import run_and_get_code

from learner.batch import RolloutBatch
from learner.learner import Learner
from learner.model import elementwise
from learner.model.attention.rotary import rope_tables
from learner.model.config import TransformerConfig
from learner.model.elementwise import LARGEST_E4M3, PLAIN, Elementwise, fuse_elementwise
from learner.model.networks import make_model
from learner.model.quantization.fp8 import quantize_to_fp8
from learner.model.transformer import Transformer, init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.learner.methods.test_algorithms import algorithm_config, algorithm_sampler

# torch.compile warns about its own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]
compiles_for_this_machine = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

ROWS, HEADS, LENGTH, WIDTH = 3, 4, 11, 16
FUNCTIONS = ("norm_and_rotate", "rotate only", "part of a head", "add_and_norm", "gated")


@pytest.fixture
def captured(counted: list[torch.fx.GraphModule]) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs of the test, captured and left unchanged."""
    elementwise._compiled_functions.cache_clear()
    yield counted
    elementwise._compiled_functions.cache_clear()


def _inputs(name: str, config: TransformerConfig) -> list[Tensor | float | None]:
    """Return float64 inputs of a function, whose values bfloat16 represents exactly."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().double()

    heads, wide = random(ROWS, LENGTH, HEADS, WIDTH).transpose(1, 2), random(ROWS, LENGTH, 4 * WIDTH)
    of_config = config.model_copy(
        update={"head_width": WIDTH, "rotary_width": 6 if name == "part of a head" else WIDTH}
    )
    cos, sin = (table.double() for table in rope_tables(LENGTH, of_config, torch.device("cpu")))
    match name:
        case "norm_and_rotate" | "part of a head":
            return [heads, random(WIDTH), 1e-5, cos, sin]
        case "rotate only":
            return [heads, None, 0.0, cos, sin]
        case "add_and_norm":
            return [wide, random(*wide.shape), random(4 * WIDTH), 1e-5]
    return [wide, random(*wide.shape)]


def _rotated(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned = x[..., [*range(width // 2, width), *range(width // 2)]]
    return torch.cat((x[..., :width] * cos + turned * signed_sin, x[..., width:]), dim=-1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight


def _expected(name: str, args: list[Any]) -> list[Tensor]:
    """Compute a function in the precision of its inputs, with formulas of its own."""
    match name:
        case "norm_and_rotate" | "part of a head":
            return [_rotated(_normed(*args[:3]), *args[3:])]
        case "rotate only":
            return [_rotated(args[0], *args[3:])]
        case "add_and_norm":
            return [args[0] + args[1], _normed(args[0] + args[1], *args[2:])]
    return [args[0] * args[0].sigmoid() * args[1]]


def _values_and_gradients(
    function: Callable[..., Any], args: list[Any], dtype: torch.dtype, *, with_gradient: bool = True
) -> list[Tensor]:
    """Return a function's results and the gradients of its inputs but the rotary tables, which stay in float32."""
    leaves = [
        value.detach()
        .to(torch.float32 if index >= 3 and dtype is not torch.float64 else dtype)
        .requires_grad_(index < 3)
        if isinstance(value, Tensor)
        else value
        for index, value in enumerate(args)
    ]
    with torch.inference_mode(not with_gradient):
        # Functions may overwrite their inputs, which are never leaves in a policy.
        found = function(*(value.clone() if isinstance(value, Tensor) else value for value in leaves))
    found = [found] if isinstance(found, Tensor) else list(found)
    if not with_gradient:
        return found
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.dtype) for one in found]
    sum((one * weight).sum() for one, weight in zip(found, weights, strict=True)).backward()
    return [*found, *(leaf.grad for leaf in leaves[:3] if isinstance(leaf, Tensor) and leaf.grad is not None)]


def _function_of(functions: Elementwise, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(functions, name if hasattr(functions, name) else "norm_and_rotate")
    return found


def _check_against_float64(functions: Elementwise, name: str, config: TransformerConfig, dtype: torch.dtype) -> None:
    args = _inputs(name, config)
    most = 3e-6 if dtype is torch.float32 else 0.01
    for with_gradient in (True, False):
        expected = _values_and_gradients(
            lambda *given: _expected(name, list(given)), args, torch.float64, with_gradient=with_gradient
        )
        found = _values_and_gradients(_function_of(functions, name), args, dtype, with_gradient=with_gradient)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype is dtype
            assert (ours.double() - theirs).norm() < most * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_plain_functions_equal_float64(name: str, dtype: torch.dtype, config: TransformerConfig) -> None:
    _check_against_float64(PLAIN, name, config, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [pytest.param(name, marks=compiles_for_this_machine) for name in FUNCTIONS])
def test_compiled_functions_equal_float64(name: str, dtype: torch.dtype, config: TransformerConfig) -> None:
    _check_against_float64(elementwise._compiled_functions(), name, config, dtype)


@pytest.mark.parametrize("name", [pytest.param(name, marks=compiles_for_this_machine) for name in FUNCTIONS])
def test_a_compiled_function_is_one_kernel_forward_and_one_backward(name: str, config: TransformerConfig) -> None:
    torch._dynamo.reset()
    function = _function_of(elementwise._compiled_functions(), name)
    args = _inputs(name, config)
    _, codes = run_and_get_code(_values_and_gradients, function, args, torch.bfloat16)
    assert [len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) for code in codes] == [1, 1]


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=compiles_for_this_machine) for dtype in (torch.float32, torch.bfloat16)]
)
@torch.inference_mode()
def test_compiled_rounding_to_fp8_equals_the_plain_one(dtype: torch.dtype) -> None:
    matrix = (torch.randn(5, 64) * torch.logspace(-4, 4, 5)[:, None]).to(dtype)
    matrix[2] = 0
    (ours, our_scales), (theirs, their_scales) = (
        functions.quantized_rows(matrix) for functions in (elementwise._compiled_functions(), PLAIN)
    )
    torch.testing.assert_close(our_scales, their_scales, atol=0, rtol=1e-6)
    # A number in the middle between two others may be rounded either way.
    assert (ours.float() != theirs.float()).float().mean() < 0.01
    assert ours.float().abs().max() <= LARGEST_E4M3


def _model(config: TransformerConfig) -> Transformer:
    model = make_model(config)
    init_weights(model, 0, scale=2.0)
    return model


def _configs(config: TransformerConfig, moe_config: TransformerConfig) -> dict[str, TransformerConfig]:
    sdar = {"family": "sdar", "block_length": 4, "qk_norm": True}
    return {"llada": config, "sdar": TransformerConfig(**config.model_dump() | sdar), "experts": moe_config}


@pytest.mark.parametrize("family", ["llada", "sdar", "experts"])
@torch.inference_mode()
def test_a_fused_policy_equals_the_plain_one_and_layers_share_graphs(
    family: str, config: TransformerConfig, moe_config: TransformerConfig, captured: list[torch.fx.GraphModule]
) -> None:
    counts = []
    for num_layers in (2, 5):
        deep = _configs(config, moe_config)[family].model_copy(update={"num_layers": num_layers})
        plain, fused = _model(deep), _model(deep)
        fuse_elementwise(fused)
        for rows, width in ((3, 10), (4, 13), (6, 9)):
            ids = torch.randint(0, 38, (rows, width), generator=torch.Generator().manual_seed(rows))
            lengths = None if deep.is_block_causal else torch.arange(width - rows + 1, width + 1)
            # Some CPUs' fused kernels round differently, by up to 1.4e-5.
            torch.testing.assert_close(fused(ids, lengths), plain(ids, lengths), atol=5e-5, rtol=1e-5)
        counts.append(len(captured))
    assert 3 <= counts[0] == counts[1]


def test_a_fused_learner_takes_the_same_step(
    config: TransformerConfig, rollouts: RolloutBatch, captured: list[torch.fx.GraphModule]
) -> None:
    """With activation checkpointing, whose backward pass runs the functions again in another thread."""
    weights = []
    for way in (False, "elementwise"):
        sharding = ShardingConfig.model_validate({"compile": way, "activation_checkpointing": True})
        policy = ShardedPolicy(_model(config), None, sharding)
        learner = Learner(policy, algorithm_config("diffu-grpo"), algorithm_sampler("diffu-grpo"))
        learner.update(rollouts, 0)
        weights.append({name: one.detach().clone() for name, one in policy.trained_parameters.items()})
    assert captured
    plain, fused = weights
    untrained = dict(_model(config).named_parameters())
    for name, weight in plain.items():
        moved = float((weight - untrained[name].detach()).abs().max())
        assert moved > 0
        torch.testing.assert_close(fused[name], weight, atol=0.01 * moved, rtol=0, msg=name)


@pytest.mark.usefixtures("captured")
def test_a_fused_policy_can_be_compiled_as_a_whole(config: TransformerConfig) -> None:
    plain, fused = _model(config), _model(config)
    fuse_elementwise(fused)
    ids = torch.arange(30).view(3, 10)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fused, fullgraph=True)(ids), plain(ids), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_fused_sampler_samples_the_same(
    cache: str, config: TransformerConfig, captured: list[torch.fx.GraphModule]
) -> None:
    params = SamplingParams(gen_length=12, block_length=4, num_denoise_steps=6, cache=cache)
    requests = [Request(prompt_ids=tuple(range(1, 4 + row)), params=params, seed=row) for row in range(3)]
    plain, fused = (
        Sampler(_model(config), 0, EngineConfig.model_validate({"compile": way, "num_slots": 3})).generate(requests)
        for way in (False, "elementwise")
    )
    assert captured
    assert [list(one.token_ids) for one in fused] == [list(one.token_ids) for one in plain]


@torch.inference_mode()
def test_fp8_layers_are_fused_too(config: TransformerConfig, captured: list[torch.fx.GraphModule]) -> None:
    model = _model(config.model_copy(update={"d_model": 64, "mlp_hidden_size": 96}))
    quantize_to_fp8(model)
    plain = copy.deepcopy(model)
    fuse_elementwise(model)
    ids = torch.arange(30).view(3, 10)
    torch.testing.assert_close(model(ids), plain(ids), atol=1e-4, rtol=1e-4)
    assert any(node.target is torch.amax or "amax" in str(node.target) for one in captured for node in one.graph.nodes)


@pytest.mark.usefixtures("captured")
def test_exceeding_the_graph_limit_raises(config: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(config)
    fuse_elementwise(model)
    # The limit is restored after the test.
    with torch._dynamo.config.patch(recompile_limit=8):
        model(torch.arange(30).view(3, 10))
        monkeypatch.setattr(elementwise, "MAX_GRAPHS", 1)
        # A single row needs other graphs.
        with pytest.raises(FailOnRecompileLimitHit):
            model(torch.arange(10).view(1, 10))


def test_a_policy_with_fused_functions_may_have_experts_in_float32(moe_config: TransformerConfig) -> None:
    """The conditions of whole compiled blocks do not apply."""
    assert EngineConfig(compile="elementwise").incompatibility(moe_config) is None
    assert EngineConfig(compile=True).incompatibility(moe_config) is not None
