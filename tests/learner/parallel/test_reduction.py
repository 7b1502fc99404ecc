"""Reducing gradients: once per optimizer step, with the gradient of one process, and the same bits in every run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig
from learner.model.transformer import Transformer, init_weights
from learner.optimizer import PolicyOptimizer, StepResult
from learner.parallel.sharded_tensors import gathered, on_cpu
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from tests.ranks import run_ranks

LIMIT = "learner.parallel.sharding_config.MAX_LOCAL_GRADIENT_BYTES"
LORA = LoraConfig(rank=4, alpha=8)
ONE, MANY = 10_000, 30
"""Tokens of a micro-batch: all rows of a rank at once, or two; then there is imitation too."""
GROUPS = 3
"""Modules that FSDP shards: two blocks and the root."""


class _Reductions(TorchDispatchMode):
    """Counts the collectives that reduce gradients within the block, and the bytes that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d" and func._opname in ("_reduce_scatter_base_", "allreduce_"):
            tensor = args[1] if func._opname == "_reduce_scatter_base_" else args[0][0]
            # The other sums over ranks are of a few numbers.
            if tensor.numel() > 100:
                self.counts[func._opname] += 1
                self.num_bytes[func._opname] += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def _policy(
    config: TransformerConfig, *, lora: LoraConfig | None = None, on_ranks: bool = False, workers_per_copy: int = 0
) -> ShardedPolicy:
    model = Transformer(config)
    init_weights(model, seed=0)
    mesh = make_mesh("cpu", workers_per_copy) if on_ranks else None
    sharding = ShardingConfig(workers_per_copy=workers_per_copy)
    return ShardedPolicy(model, mesh, sharding, lora=lora or LoraConfig(), seed=3)


def _learner(policy: ShardedPolicy, micro_batch_tokens: int) -> Learner:
    config = LearnerConfig(
        num_rounds=1,
        group_size=4,
        groups_per_round=3,
        inner_updates=2,
        micro_batch_tokens=micro_batch_tokens,
        lr=1e-3,
        imitation_coef=0.2 if micro_batch_tokens == MANY else 0.0,
    )
    return Learner(policy, config)


def _gradients(policy: ShardedPolicy, batch: RolloutBatch, micro_batch_tokens: int) -> dict[str, Any]:
    """Return the gradients of a round's first step, and the reductions of all its steps."""
    learner, found, step = _learner(policy, micro_batch_tokens), [], PolicyOptimizer.step

    def recorded(self: PolicyOptimizer, lr: float, max_grad_norm: float, loss: torch.Tensor) -> StepResult:
        named = policy.trained_parameters.items()
        found.append({name: on_cpu(gathered(weight.grad)) for name, weight in named if weight.grad is not None})
        return step(self, lr, max_grad_norm, loss)

    with patch.object(PolicyOptimizer, "step", recorded), _Reductions() as seen:
        learner.update(batch, 0)
    return {
        "gradients": found[0],
        "weights": policy.full_weights(),
        "counts": dict(seen.counts),
        "bytes": dict(seen.num_bytes),
    }


def _failed_round(policy: ShardedPolicy, batch: RolloutBatch) -> bool:
    """Return whether a round that fails at its second step leaves the weights, and the next round, bit-identical."""
    before, learner = policy.full_weights(), _learner(policy, MANY)
    step, calls = PolicyOptimizer.step, []

    def fails(self: PolicyOptimizer, lr: float, max_grad_norm: float, loss: torch.Tensor) -> StepResult:
        calls.append(1)
        return step(self, lr, max_grad_norm, loss * float("nan") if len(calls) == 2 else loss)

    with patch.object(PolicyOptimizer, "step", fails), pytest.raises(FloatingPointError):
        learner.update(batch, 0)
    kept = all(torch.equal(weight, before[name]) for name, weight in policy.full_weights().items())
    learner.update(batch, 0)
    return kept


def _rank(rank: int, meeting: str, config: TransformerConfig, batch: RolloutBatch, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

    def fresh(lora: LoraConfig | None = None) -> ShardedPolicy:
        return _policy(config, lora=lora, on_ranks=True)

    found: dict[str, Any] = {
        "many": _gradients(fresh(), batch, MANY),
        "many again": _gradients(fresh(), batch, MANY),
        "one": _gradients(fresh(), batch, ONE),
        "adapter": _gradients(fresh(LORA), batch, MANY),
    }
    policy = fresh()
    found["rollback"] = _failed_round(policy, batch)
    found["after rollback"] = policy.full_weights()
    with patch(LIMIT, 0):
        found["each"] = _gradients(fresh(), batch, MANY)
        found["each of one"] = _gradients(fresh(), batch, ONE)
        found["large adapter"] = _gradients(fresh(LORA), batch, MANY)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory, config: TransformerConfig) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("reduced")
    run_ranks(_rank, str(directory / "meeting"), config, _rollouts(), directory / "out.pt", num=2)
    return torch.load(directory / "out.pt", weights_only=True)


def _rollouts() -> RolloutBatch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (12,), generator=generator)
    completions = torch.randint(0, 38, (12, 8), generator=generator)
    completions[torch.arange(8) >= lengths[:, None] - 1] = 39
    zeros, rewards = torch.zeros(12, 8), torch.rand(12, generator=generator)
    return RolloutBatch(
        prompt_ids=torch.randint(0, 38, (12, 6), generator=generator),
        prompt_lengths=torch.full((12,), 6),
        completion_ids=completions,
        completion_lengths=lengths,
        sample_keys=torch.arange(12),
        rewards=rewards,
        reward_parts=rewards[:, None],
        correct=rewards > 0.5,
        truncated=lengths == 8,
        is_stop=completions == 39,
        group_ids=torch.arange(12) // 4,
        step_map=torch.arange(8).expand(12, 8) // 2,
        commit_logp=zeros,
        commit_entropy=zeros,
        commit_law_entropy=zeros,
        fallback=zeros.bool(),
        num_forwards=torch.full((12,), 4),
        policy_versions=torch.zeros(12, dtype=torch.long),
    )


def _assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(ours[name], expected, atol=1e-6 * scale, rtol=0, msg=name)


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, expected in theirs.items() if not torch.equal(ours[name], expected)] == []


@pytest.mark.parametrize("case", ["many", "adapter", "large adapter"])
def test_a_gradient_is_reduced_once_per_step(on_two_ranks: dict[str, Any], case: str) -> None:
    """However many micro-batches there are, and imitation too. An adapter's is, whatever its size."""
    # The root has no adapter.
    groups = GROUPS if case == "many" else GROUPS - 1
    assert on_two_ranks[case]["counts"] == {"_reduce_scatter_base_": 2 * groups}


def test_a_large_gradient_is_reduced_after_every_micro_batch(on_two_ranks: dict[str, Any]) -> None:
    each, once = on_two_ranks["each"], on_two_ranks["many"]
    assert each["counts"]["_reduce_scatter_base_"] >= 4 * once["counts"]["_reduce_scatter_base_"]
    assert each["bytes"]["_reduce_scatter_base_"] >= 4 * once["bytes"]["_reduce_scatter_base_"]
    _assert_close(each["gradients"], once["gradients"])


@pytest.mark.parametrize("case", ["many", "one", "each", "adapter"])
def test_the_gradient_is_that_of_one_process(
    config: TransformerConfig, on_two_ranks: dict[str, Any], case: str
) -> None:
    policy, tokens = _policy(config, lora=LORA if case == "adapter" else None), ONE if case == "one" else MANY
    _assert_close(on_two_ranks[case]["gradients"], _gradients(policy, _rollouts(), tokens)["gradients"])


def test_with_one_micro_batch_reducing_each_is_bit_identical(on_two_ranks: dict[str, Any]) -> None:
    for part in ("gradients", "weights"):
        _assert_equal(on_two_ranks["one"][part], on_two_ranks["each of one"][part])
    assert on_two_ranks["one"]["counts"] == on_two_ranks["each of one"]["counts"]


def test_another_run_is_bit_identical(on_two_ranks: dict[str, Any]) -> None:
    for part in ("gradients", "weights"):
        _assert_equal(on_two_ranks["many again"][part], on_two_ranks["many"][part])


def test_a_skipped_round_leaves_no_gradient(on_two_ranks: dict[str, Any]) -> None:
    assert on_two_ranks["rollback"]
    _assert_equal(on_two_ranks["after rollback"], on_two_ranks["many"]["weights"])


def _copies_rank(rank: int, meeting: str, config: TransformerConfig, batch: RolloutBatch, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=4)
    found = {}
    for limit in (0, 10**9):
        with patch(LIMIT, limit):
            found[limit] = _gradients(_policy(config, on_ranks=True, workers_per_copy=2), batch, MANY)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def test_large_gradients_are_reduced_over_copies_once_per_step(config: TransformerConfig, tmp_path: Path) -> None:
    """Within a copy of the policy they are reduced after every micro-batch."""
    out = tmp_path / "out.pt"
    run_ranks(_copies_rank, str(tmp_path / "meeting"), config, _rollouts(), out, num=4)
    found = torch.load(out, weights_only=True)
    large, small = found[0], found[10**9]
    assert large["counts"]["allreduce_"] == small["counts"]["allreduce_"] == 2 * GROUPS
    assert large["counts"]["_reduce_scatter_base_"] >= 2 * small["counts"]["_reduce_scatter_base_"]
    expected = _gradients(_policy(config), _rollouts(), MANY)["gradients"]
    for case in (large, small):
        _assert_close(case["gradients"], expected)
