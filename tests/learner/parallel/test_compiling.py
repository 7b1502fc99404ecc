"""Compiled blocks equal eager ones and share a few graphs; a graph break raises.

Graphs are captured and then run eagerly, which costs a second each. The nightly tests compile them for this machine.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from learner.batch import RolloutBatch
from learner.learner import Learner
from learner.model import elementwise
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.networks import make_model
from learner.model.targets import Targets
from learner.model.transformer import init_weights
from learner.parallel.sharded_tensors import gathered, on_cpu
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from tests.learner.captured_graphs import compile_by_capture, graphs
from tests.learner.methods.test_algorithms import Recorder, algorithm_config, algorithm_sampler, moved
from tests.ranks import run_ranks

# torch.compile warns about its own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

LORA = LoraConfig(rank=4, alpha=8)
NF4 = LoraConfig(rank=4, alpha=8, base_weights="nf4")
BLOCK_CAUSAL = {"family": "sdar", "block_length": 4, "qk_norm": True}
CASES: dict[str, tuple[str, dict[str, Any], LoraConfig, dict[str, bool]]] = {
    "one step": ("diffu-grpo", {}, FULL_FINE_TUNING, {}),
    "one step, block-causal": ("diffu-grpo", BLOCK_CAUSAL, FULL_FINE_TUNING, {}),
    "trajectories, block-causal": ("tracerl", BLOCK_CAUSAL, FULL_FINE_TUNING, {}),
    "bound, adapter": ("espo", {}, LORA, {"activation_checkpointing": True}),
}
SHARES = ((4, 10, 3), (5, 13, 2))
"""Rows, width and queried slots of each rank's batch."""


def _policy(
    config: TransformerConfig, *, lora: LoraConfig = FULL_FINE_TUNING, on_ranks: bool = False, **sharding: object
) -> ShardedPolicy:
    model = make_model(config)
    init_weights(model, seed=0)
    mesh = make_mesh("cpu") if on_ranks else None
    policy = ShardedPolicy(model, mesh, ShardingConfig.model_validate(sharding), lora=lora)
    generator = torch.Generator().manual_seed(1)
    # A fresh adapter's B is zero, so that its A has no gradient.
    adapter = {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in policy.adapter_on_rank_0().items()}
    policy.load_adapter(adapter)
    return policy


def _logps(policy: ShardedPolicy, rows: int, width: int, asked: int) -> Tensor:
    """Return the log-probabilities of some tokens, in a batch of rows of unequal lengths."""
    generator = torch.Generator().manual_seed(rows * width)
    ids = torch.randint(0, 38, (rows, width), generator=generator)
    queries = torch.randint(0, 3, (rows, asked), generator=generator)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    scored = torch.arange(0, rows * asked, 2)
    slots = torch.arange(len(scored))
    found: Tensor = policy.module(ids, lengths, queries, scored, targets=Targets(slot=slots, token=slots % 38))
    return found


def _gradients(policy: ShardedPolicy, rows: int, width: int, asked: int) -> dict[str, Tensor]:
    _logps(policy, rows, width, asked).square().sum().backward()
    found = {name: on_cpu(gathered(p.grad)) for name, p in policy.trained_parameters.items()}
    policy.module.zero_grad()
    return found


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            ours[name], gradient, atol=tolerance * float(gradient.abs().max()), rtol=0, msg=f"the gradient of {name}"
        )


def test_layers_and_batch_sizes_share_graphs(config: TransformerConfig, counted: list[torch.fx.GraphModule]) -> None:
    for num_layers in (2, 5):
        deep = config.model_copy(update={"num_layers": num_layers})
        compiled, eager = _policy(deep, compile=True), _policy(deep)
        for sizes in ((3, 10, 4), (4, 13, 5), (6, 9, 2), (5, 7, 6)):
            _assert_equal(_gradients(compiled, *sizes), _gradients(eager, *sizes))
            assert len(counted) == 2, "one of the last block, which runs on what is asked, and one of the others"
        _assert_equal(_gradients(compiled, 1, 11, 3), _gradients(eager, 1, 11, 3))
        counted[2:4] = []  # A single row has its own graphs.


@pytest.mark.nightly
def test_head_counts_may_be_symbolic(config: TransformerConfig, counted: list[torch.fx.GraphModule]) -> None:
    """torch makes the head counts of sharded policies symbolic once a process has compiled another count."""
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for heads in (4, 8):
            changes = {"num_heads": heads, "num_kv_heads": heads // 2, "num_layers": 1}
            policy = _policy(config.model_copy(update=changes), compile=True)
            policy.module(torch.arange(30).view(3, 10)).sum().backward()
    assert len(counted) == 2


def test_compiled_adapters_can_be_enabled_and_disabled(
    config: TransformerConfig, counted: list[torch.fx.GraphModule]
) -> None:
    """With activation checkpointing, whose backward pass runs the same graphs again."""
    lora = LoraConfig(rank=4, alpha=8, targets=("q_proj", "down_proj"))
    compiled, eager = (
        _policy(config, lora=lora, compile=is_compiled, activation_checkpointing=True) for is_compiled in (True, False)
    )
    _assert_equal(_gradients(compiled, 3, 10, 4), _gradients(eager, 3, 10, 4), 1e-6)
    with torch.no_grad():
        adapted = _logps(eager, 3, 10, 4)
        with compiled.disable_adapters(), eager.disable_adapters():
            expected = _logps(eager, 3, 10, 4)
            torch.testing.assert_close(_logps(compiled, 3, 10, 4), expected, atol=1e-6, rtol=0)
    assert not torch.allclose(adapted, expected)
    assert len(counted) == 4


def test_exceeding_the_graph_limit_raises_in_every_thread(
    config: TransformerConfig, counted: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass that recomputes a block runs in another thread, and since torch 2.13 the limit is per thread."""
    monkeypatch.setattr(elementwise, "MAX_GRAPHS", 2)
    policy = _policy(config, compile=True)
    # The limit is restored after the test.
    with torch._dynamo.config.patch(recompile_limit=8), ThreadPoolExecutor(1) as thread:
        thread.submit(_logps, policy, 3, 10, 4).result()
        assert len(counted) == 2
        with pytest.raises(FailOnRecompileLimitHit):
            thread.submit(_logps, policy, 1, 10, 4).result()


def _update(policy: ShardedPolicy, algorithm: str, batch: RolloutBatch) -> tuple[dict[str, float], Recorder]:
    """Return metrics and gradients of two optimizer steps; the reference differs from the trained policy."""
    config = algorithm_config(algorithm, micro_batch_tokens=60)
    learner = Learner(policy, config, algorithm_sampler(algorithm))
    if learner.reference is not None:
        moved(learner.reference.module)
    recorder = Recorder(policy.module, moved)
    learner.optimizer = recorder  # type: ignore[assignment]
    return learner.update(batch, 0), recorder


def _compare_updates(config: TransformerConfig, case: str, batch: RolloutBatch, tolerance: float) -> None:
    algorithm, family, lora, sharding = CASES[case]
    of_family = TransformerConfig(**config.model_dump() | family)
    (compiled, ours), (eager, theirs) = (
        _update(_policy(of_family, lora=lora, compile=is_compiled, **sharding), algorithm, batch)
        for is_compiled in (True, False)
    )
    assert compiled == pytest.approx(eager, rel=tolerance, abs=tolerance)
    assert len(ours.gradients) == len(theirs.gradients) == 2
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        _assert_equal(one, other, tolerance)


def test_compiled_updates_equal_eager_ones_with_few_graphs(
    config: TransformerConfig, rollouts: RolloutBatch, counted: list[torch.fx.GraphModule]
) -> None:
    """Old, new and reference likelihoods of two estimators, in micro-batches of many sizes. A single block, being the
    last, has most kinds of graphs."""
    for case in ("one step, block-causal", "trajectories, block-causal"):
        _compare_updates(config.model_copy(update={"num_layers": 1}), case, rollouts, 1e-6)
    assert 3 <= len(counted) <= 8


def _rank(rank: int, port_file: str, config: TransformerConfig, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    torch.compile = compile_by_capture  # type: ignore[assignment]
    sharding = {"activation_checkpointing": True, "compute_dtype": "bfloat16" if config.moe else "float32"}
    found = {}
    for name, is_compiled in (("eager", False), ("compiled", True)):
        policy = _policy(config, on_ranks=True, compile=is_compiled, **sharding)
        # Ranks may have different shapes.
        gradients = _gradients(policy, *SHARES[rank])
        found[name] = {"gradients": gradients, "num_graphs": len(graphs)}
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["dense", pytest.param("experts", marks=pytest.mark.nightly)])
def test_two_ranks_compile_under_fsdp(
    config: TransformerConfig, moe_config: TransformerConfig, tmp_path: Path, family: str
) -> None:
    """Under FSDP2 with activation checkpointing. Experts run in bfloat16, whose compiled products differ."""
    of_family, tolerance = (config, 1e-6) if family == "dense" else (moe_config, 0.03)
    deep = of_family.model_copy(update={"num_layers": 3})
    run_ranks(_rank, str(tmp_path / "at"), deep, tmp_path, num=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        _assert_equal(found["compiled"]["gradients"], found["eager"]["gradients"], tolerance)
        assert found["eager"]["num_graphs"] == 0
        # One for the last block and one for the others; with experts, the dense first block has a third.
        assert found["compiled"]["num_graphs"] == (2 if family == "dense" else 3)


def test_unsupported_compilation_is_refused(config: TransformerConfig, moe_config: TransformerConfig) -> None:
    with pytest.raises(ValueError, match="experts are compiled in bfloat16 only; take sharding"):
        _policy(moe_config, compile=True)
    kept = "compiled blocks keep what 4 bits stand for until their backward pass; take sharding"
    with pytest.raises(ValueError, match=kept):
        _policy(config, lora=NF4, compile=True)
    checkpointed = ShardingConfig(compile=True, activation_checkpointing=True)
    assert checkpointed.incompatibility(config, NF4) is None
    assert ShardingConfig().incompatibility(moe_config, FULL_FINE_TUNING) is None
    assert ShardingConfig(compile=True, compute_dtype="bfloat16").incompatibility(moe_config, FULL_FINE_TUNING) is None


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("case", ["one step", "trajectories, block-causal", "bound, adapter"])
def test_an_inductor_update_equals_the_eager_one(config: TransformerConfig, rollouts: RolloutBatch, case: str) -> None:
    _compare_updates(config.model_copy(update={"num_layers": 1}), case, rollouts, 1e-4)
