"""A sharded step is a single step: two ranks with FSDP2 on gloo against one process without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from learner.batch import RolloutBatch
from learner.documents import Documents
from learner.learner import Learner, LearnerConfig
from learner.model.transformer import Transformer, TransformerConfig, init_weights
from learner.sft import SftConfig
from learner.sft_learner import SftLearner, evaluation_loss
from learner.sharding import ShardedPolicy, make_mesh

RL = LearnerConfig(
    num_rounds=2,
    group_size=4,
    groups_per_round=3,
    inner_updates=2,
    micro_batch_size=4,
    lr=1e-3,
    max_grad_norm=0.5,
    reference_sync_rounds=1,
)
SFT = SftConfig(num_labels=12, num_steps=3, batch_size=5, lr=1e-3, num_warmup_steps=0)


def _train(
    policy: ShardedPolicy, batch: RolloutBatch, resume_from: dict[str, torch.Tensor] | None
) -> dict[str, object]:
    documents = Documents(
        ids=torch.cat((batch.prompt_ids, batch.completion_ids), dim=1),
        prompt_lengths=batch.prompt_lengths,
        lengths=batch.prompt_lengths + batch.completion_lengths,
        sample_keys=batch.sample_keys,
    )
    metrics: list[dict[str, float]] = []
    for packing in (False, True):
        sft = SftLearner(policy, SFT.model_copy(update={"packing": packing}), documents, seed=0)
        metrics += [sft.step(step, 1e-3) for step in range(2)]
    evaluated = evaluation_loss(policy, documents, batch_size=4)
    metrics.append({"evaluation_loss": evaluated.loss, "at_large_t": evaluated.loss_at_t[-1]})
    learner = Learner(policy, RL)
    if resume_from is not None:
        learner.load_full_state(resume_from)
    metrics += [learner.update(batch, round_index) for round_index in range(2)]
    return {"weights": policy.full_weights(), "optimizer": learner.full_state(), "metrics": metrics}


def _rank(rank: int, port_file: str, config: TransformerConfig, batch: RolloutBatch, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    model = Transformer(config)
    init_weights(model, seed=0)
    first = _train(ShardedPolicy(model, make_mesh("cpu")), batch, None)
    shared = [first["optimizer"]]
    dist.broadcast_object_list(shared, src=0)  # In a run every rank reads rank 0's from the checkpoint.
    model = Transformer(config)
    init_weights(model, seed=0)
    again = _train(ShardedPolicy(model, make_mesh("cpu")), batch, shared[0])  # type: ignore[arg-type]
    if rank == 0:
        torch.save({"first": first, "again": again}, out)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, config: TransformerConfig) -> dict[str, dict[str, object]]:
    directory = tmp_path_factory.mktemp("ranks")
    mp.spawn(
        _rank, args=(str(directory / "rendezvous"), config, _rollouts(), directory / "out.pt"), nprocs=2, join=True
    )
    return torch.load(directory / "out.pt", weights_only=True)


def _rollouts() -> RolloutBatch:
    generator = torch.Generator().manual_seed(1)
    completions = torch.randint(0, 38, (11, 8), generator=generator)
    lengths = torch.randint(1, 9, (11,), generator=generator)
    completions[torch.arange(8) >= lengths[:, None] - 1] = 39
    return RolloutBatch(
        prompt_ids=torch.randint(0, 38, (11, 6), generator=generator),
        prompt_lengths=torch.full((11,), 6),
        completion_ids=completions,
        completion_lengths=lengths,
        sample_keys=torch.arange(11),
        rewards=torch.rand(11, generator=generator),
        group_ids=torch.arange(11) // 4,
        step_map=torch.zeros(11, 8, dtype=torch.long),
        commit_logp=torch.zeros(11, 8),
        policy_versions=torch.zeros(11, dtype=torch.long),
    )


def _single(config: TransformerConfig, resume_from: dict[str, torch.Tensor] | None) -> dict[str, object]:
    model = Transformer(config)
    init_weights(model, seed=0)
    return _train(ShardedPolicy(model, None), _rollouts(), resume_from)


@pytest.mark.parametrize("which", ["first", "again"])
def test_two_ranks_are_one(config: TransformerConfig, sharded: dict[str, dict[str, object]], which: str) -> None:
    """Eleven rows on two ranks: an odd shard, filled up, must not change the mean."""
    first = _single(config, None)
    single = first if which == "first" else _single(config, first["optimizer"])  # type: ignore[arg-type]
    for part in ("weights", "optimizer"):
        expected = single[part]
        assert isinstance(expected, dict)
        assert sharded[which][part].keys() == expected.keys()  # type: ignore[attr-defined]
        for name, tensor in expected.items():
            # Adam turns the last bit of a gradient near zero into a part of a step: the bound is a tenth of a step.
            torch.testing.assert_close(sharded[which][part][name], tensor, atol=1e-4, rtol=1e-3, msg=name)  # type: ignore[index]
    for ours, theirs in zip(sharded[which]["metrics"], single["metrics"], strict=True):  # type: ignore[call-overload]
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_weights_go_in_as_they_came_out(config: TransformerConfig) -> None:
    policy, other = (ShardedPolicy(Transformer(config), None) for _ in range(2))
    other.load_full_weights(policy.full_weights())
    for name, tensor in policy.full_weights().items():
        assert torch.equal(other.full_weights()[name], tensor)


def test_full_weights_are_not_the_live_ones(config: TransformerConfig) -> None:
    policy = ShardedPolicy(Transformer(config), None)
    taken = policy.full_weights()
    before = taken["head.weight"].clone()
    with torch.no_grad():
        policy.module.head.weight.add_(1)
    assert torch.equal(taken["head.weight"], before)
