"""Mixture-of-experts layers: routing of tokens, expert outputs, and parameters that stay fixed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from learner.model.config import TransformerConfig
from learner.model.moe.config import MoEConfig
from learner.model.moe.experts import ExpertLinear, SparseMLP
from learner.model.networks import make_model
from learner.model.transformer import SwiGLU, Transformer, init_weights

WIDTH = 32
SOFTMAX: dict[str, Any] = {"num_experts": 8, "experts_per_token": 3, "expert_width": 16, "router": "softmax"}
SIGMOID = SOFTMAX | {"router": "sigmoid", "num_groups": 4, "kept_groups": 2, "scale": 2.5, "shared_width": 32}
SHAPES = {
    "softmax": SOFTMAX,
    "not normalised": SOFTMAX | {"is_normalised": False},
    "sigmoid in groups": SIGMOID,
    "sigmoid": SIGMOID | {"num_groups": 1, "kept_groups": 1, "shared_width": 0},
}


def _layer(shape: dict[str, Any]) -> SparseMLP:
    config = MoEConfig(**shape)
    layer = SparseMLP(WIDTH, config, SwiGLU(WIDTH, config.shared_width) if config.shared_width else None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return layer


def _tokens(num: int) -> Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(1))


def _best(values: dict[int, float], num: int) -> list[int]:
    return sorted(values, key=lambda key: -values[key])[:num]


def _of_one_token(layer: SparseMLP, x: Tensor) -> Tensor:
    """Compute one token in plain loops and float64, from the descriptions in the models' reports."""
    config, router = layer.router.config, layer.router
    logits = [float(row @ x) for row in router.weight.double()]
    scores = torch.tensor(logits, dtype=torch.float64)
    scores = scores.softmax(0) if config.router == "softmax" else scores.sigmoid()
    bias = [0.0] * config.num_experts if router.expert_bias is None else router.expert_bias.tolist()
    ranks = {expert: float(scores[expert]) + bias[expert] for expert in range(config.num_experts)}
    size = config.num_experts // config.num_groups
    groups = {
        group: sum(sorted(ranks[expert] for expert in range(group * size, (group + 1) * size))[-2:])
        for group in range(config.num_groups)
    }
    kept = _best(groups, config.kept_groups)
    chosen = _best({expert: rank for expert, rank in ranks.items() if expert // size in kept}, config.experts_per_token)
    total = sum(float(scores[expert]) for expert in chosen) if config.is_normalised else 1.0
    result = (
        torch.zeros(WIDTH, dtype=torch.float64) if layer.shared is None else copy.deepcopy(layer.shared).double()(x)
    )
    for expert in chosen:
        gate, up = layer.experts.gate_up_proj.weight[expert].double().chunk(2)
        down = layer.experts.down_proj.weight[expert].double()
        result = result + float(scores[expert]) / total * config.scale * (down @ (F.silu(gate @ x) * (up @ x)))
    return result


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_layer_equals_a_token_by_token_loop(shape: dict[str, Any]) -> None:
    layer, x = _layer(shape), _tokens(40)
    with torch.no_grad():
        expected = torch.stack([_of_one_token(layer, row.double()) for row in x])
        found = layer(x.view(4, 10, WIDTH)).view(40, WIDTH)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        with torch.inference_mode():
            assert torch.equal(layer(x), found)
        # A token alone has the same output as in a batch.
        torch.testing.assert_close(layer(x[7:8]), found[7:8], atol=1e-5, rtol=1e-5)


def _with_gradients(layer: SparseMLP, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    result = layer(x)
    (result * _tokens(len(x) + 1)[1:]).sum().backward()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [result.detach(), x.grad, *(parameter.grad for parameter in trained)]


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("shape", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_the_grouped_product_equals_one_product_per_expert(
    shape: dict[str, Any], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the gradients, and of experts without tokens. A GPU uses the grouped product, the CPU the other."""
    layer, x = _layer(shape), _tokens(num_tokens)
    one_by_one = _with_gradients(copy.deepcopy(layer), x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr("learner.model.moe.experts._one_by_one", None)
    for found, expected in zip(_with_gradients(layer, x), one_by_one, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_layer_compiles_to_one_graph() -> None:
    """In bfloat16, the only dtype in which torch compiles grouped products."""
    layer, x = _layer(SIGMOID).to(torch.bfloat16), _tokens(20).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)


def test_experts_without_tokens_have_a_zero_gradient() -> None:
    linear = ExpertLinear(3, 4, 5)
    linear(torch.zeros(0, 4), torch.zeros(3, dtype=torch.int32)).sum().backward()
    assert torch.equal(linear.weight.grad, torch.zeros(3, 5, 4))


def test_routing_is_computed_in_float32() -> None:
    """In bfloat16 many of 256 experts would have equal scores."""
    config = MoEConfig(**SIGMOID | {"num_experts": 256, "num_groups": 1, "kept_groups": 1})
    half = SparseMLP(WIDTH, config, None)
    with torch.no_grad():
        half.router.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
        half.router.expert_bias.normal_(0.0, 1e-3, generator=torch.Generator().manual_seed(3))
    bias = half.router.expert_bias.clone()
    half, x = half.to(torch.bfloat16), _tokens(64).bfloat16()
    weights, experts = half.router(x)
    assert weights.dtype is torch.float32
    expected = (F.linear(x.float(), half.router.weight.float()).sigmoid() + bias).topk(config.experts_per_token).indices
    assert torch.equal(experts, expected)
    in_half = (F.linear(x, half.router.weight).sigmoid() + bias.bfloat16()).topk(config.experts_per_token).indices
    assert not torch.equal(in_half, expected)


@pytest.fixture
def model(moe_config: TransformerConfig) -> Transformer:
    model = make_model(moe_config)
    init_weights(model, seed=0)
    return model


def test_the_router_bias_stays_in_float32_without_gradient(model: Transformer) -> None:
    router = model.blocks[1].mlp.router
    assert torch.equal(router.expert_bias, torch.zeros(8))
    with torch.no_grad():
        router.expert_bias.uniform_(generator=torch.Generator().manual_seed(0))
    before = router.expert_bias.clone()
    model(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    half = copy.deepcopy(model).to(torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in half.named_parameters()}
    assert kinds.pop("blocks.1.mlp.router.expert_bias") is torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    assert torch.equal(half.blocks[1].mlp.router.expert_bias, before)
    assert router.expert_bias.grad is None
    assert router.weight.grad.abs().max() > 0
    assert not half.blocks[1].mlp.router.expert_bias.requires_grad


def test_a_fresh_policy_keeps_its_scale(model: Transformer) -> None:
    """Standard deviations depend on each expert's input width, not on the number of experts."""
    experts = model.blocks[1].mlp.experts
    assert experts.gate_up_proj.weight.std().item() == pytest.approx(32**-0.5, rel=0.05)
    assert experts.down_proj.weight.std().item() == pytest.approx((2 * 2 * 16) ** -0.5, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (SIGMOID | {"num_groups": 3}, "num_groups 3 must divide num_experts 8"),
        (SIGMOID | {"num_groups": 8}, "num_groups 8 leaves a group one expert; it is judged by its two best"),
        (SIGMOID | {"kept_groups": 5}, "kept_groups 5 is more than num_groups 4"),
        (SIGMOID | {"kept_groups": 1}, "experts_per_token 3 is more than the 2 experts of kept_groups 1"),
        (SOFTMAX | {"experts_per_token": 9}, "experts_per_token 9 is more than the 8 experts of kept_groups 1"),
        (SOFTMAX | {"scale": 2.0}, "router softmax goes with num_groups 1, scale 1 and shared_width 0, as SDAR's"),
        (SIGMOID | {"is_normalised": False}, "is_normalised is false; a sigmoid router's weights are normalised"),
        (SIGMOID | {"shared_width": 7}, "shared_width 7 must be a multiple of expert_width 16"),
        (SIGMOID | {"dense_layers": (1,)}, "dense_layers must be the first ones where the router is sigmoid"),
    ],
)
def test_invalid_shapes_are_refused(shape: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="Value error") as refused:
        MoEConfig(**shape)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"moe": None}, "moe is None; a policy of the family llada2_moe has experts behind a sigmoid router"),
        ({"family": "sdar_moe"}, "a policy of the family sdar_moe has experts behind a softmax router"),
        ({"family": "sdar"}, "a policy of the family sdar has no experts"),
        (
            {"family": "llada_moe", "block_length": None, "moe": SOFTMAX},
            "moe.is_normalised is True; a policy of the family llada_moe weighs experts by their scores",
        ),
        ({"num_layers": 1, "moe": SIGMOID | {"dense_layers": (0, 1)}}, "moe.dense_layers has 1, and num_layers is 1"),
        ({"rotary_width": 5}, "rotary_width 5 must be even, and at most a head's 12"),
        ({"rotary_width": 14}, "rotary_width 14 must be even, and at most a head's 12"),
    ],
)
def test_a_config_of_another_family_is_refused(
    moe_config: TransformerConfig, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match="Value error") as refused:
        TransformerConfig(**moe_config.model_dump() | changes)
    assert sentence in str(refused.value)
