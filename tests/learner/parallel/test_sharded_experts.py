"""Mixture of experts on two ranks equals one rank: experts sharded by rows, router biases whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.networks import make_meta_model, make_model
from learner.model.transformer import Transformer, init_weights
from learner.parallel.loading import load_by_rows
from learner.parallel.sharded_tensors import local_part
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from tests.ranks import run_ranks

RL = LearnerConfig(num_rounds=1, group_size=4, groups_per_round=3, inner_updates=1, lr=1e-3, micro_batch_tokens=56)
CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8)
HALF = ShardingConfig(compute_dtype="bfloat16", activation_checkpointing=True)
BIAS = "blocks.1.mlp.router.expert_bias"
EXPERTS = "blocks.1.mlp.experts.gate_up_proj.weight"
CASES = {
    "whole": (FULL_FINE_TUNING, ShardingConfig()),
    "adapter": (LORA, ShardingConfig()),
    "half": (FULL_FINE_TUNING, HALF),
}


def _model(config: TransformerConfig) -> Transformer:
    model = make_model(config)
    init_weights(model, seed=0)
    with torch.no_grad():
        # Sharper routing, so that no choice is close, and biases with which bfloat16 would choose other experts.
        model.blocks[1].mlp.router.weight.mul_(8.0)
        model.blocks[1].mlp.router.expert_bias.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(0))
    return model


def _found(policy: ShardedPolicy, batch: RolloutBatch) -> dict[str, Any]:
    with policy.without_gradients():
        logits = policy.module(batch.prompt_ids)
    metrics = Learner(policy, RL).update(batch, 0)
    parameters = dict(policy.module.named_parameters())
    held = {name: local_part(parameters[name]).shape for name in (BIAS, EXPERTS) if name in parameters}
    frozen = policy.frozen_copy().weights_on_rank_0() if not policy.lora.rank else {}
    trained = list(policy.trained_parameters)
    weights = policy.weights_on_rank_0()
    return {
        "metrics": metrics,
        "weights": weights,
        "frozen": frozen,
        "held": held,
        "trained": trained,
        "logits": logits,
    }


def _rank(rank: int, port_file: str, directory: Path, batch: RolloutBatch, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    mesh, found = make_mesh("cpu"), {}
    for name, (lora, sharding) in CASES.items():
        policy = load_by_rows(directory, mesh, sharding, device=CPU, lora=lora, seed=3)
        found[name] = _found(policy, batch)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@pytest.fixture
def checkpoint(moe_config: TransformerConfig, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "start", moe_config, _model(moe_config).state_dict(), tmp_path, shard_bytes=4000)
    return tmp_path / "start"


def test_two_ranks_equal_one_process(
    moe_config: TransformerConfig, rollouts: RolloutBatch, checkpoint: Path, tmp_path: Path
) -> None:
    run_ranks(_rank, str(tmp_path / "at"), checkpoint, rollouts, tmp_path / "out.pt", num=2)
    on_two = torch.load(tmp_path / "out.pt", weights_only=True)
    start = dict(_model(moe_config).named_parameters())
    for name, (lora, _) in CASES.items():
        single = load_by_rows(checkpoint, None, ShardingConfig(), device=CPU, lora=lora, seed=3)
        one, two, is_half = _found(single, rollouts), on_two[name], name == "half"
        if is_half:
            # A bfloat16 sampler's logits. In float32 a token may select other experts if two are close.
            with torch.no_grad():
                one["logits"] = _model(moe_config).to(torch.bfloat16)(rollouts.prompt_ids)
        else:
            assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
        torch.testing.assert_close(two["logits"], one["logits"], atol=0 if is_half else 1e-5, rtol=0)
        assert two["weights"].keys() == one["weights"].keys() == start.keys()
        for parameter, tensor in one["weights"].items():
            # A tenth of a step; in bfloat16 AdamW may step in the other direction.
            atol = 3e-3 if is_half else 1e-4
            torch.testing.assert_close(two["weights"][parameter], tensor, atol=atol, rtol=1e-3, msg=parameter)
        # Untrained parameters stay bit-identical, in the policy and in its reference.
        assert torch.equal(two["weights"][BIAS], start[BIAS])
        assert all(torch.equal(found[BIAS], start[BIAS]) for found in (two["frozen"],) if found)
        assert BIAS not in two["trained"]
        assert two["held"] == {BIAS: torch.Size([8]), EXPERTS: torch.Size([4, 32, 32])}
        moved = {parameter for parameter, tensor in two["weights"].items() if not torch.equal(tensor, start[parameter])}
        assert (EXPERTS in moved) == (not lora.rank)
        assert "blocks.1.mlp.shared.up_proj.weight" in moved


def test_a_published_router_bias_stays_in_float32(moe_config: TransformerConfig) -> None:
    """As published to a bfloat16 sampler."""
    weights = ShardedPolicy(_model(moe_config), None).weights_on_rank_0()
    sampler = make_meta_model(moe_config).to(torch.bfloat16).to_empty(device="cpu")
    sampler.load_state_dict(weights)
    assert torch.equal(sampler.get_parameter(BIAS), weights[BIAS])
    assert not torch.equal(weights[BIAS].bfloat16().float(), weights[BIAS])
    assert {parameter.dtype for name, parameter in sampler.named_parameters() if name != BIAS} == {torch.bfloat16}
