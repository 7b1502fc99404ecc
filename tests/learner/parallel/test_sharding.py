"""Sharded training steps equal single-process steps: ranks with FSDP2 on gloo against one process."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from learner.algorithms import ALGORITHMS
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig
from learner.model.transformer import Transformer, init_weights
from learner.optimizer import StepResult
from learner.parallel.progress import PROGRESS
from learner.parallel.sharded_tensors import gathered, on_cpu
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from learner.sft.config import SftConfig
from learner.sft.documents import Documents
from learner.sft.learner import SftLearner, evaluation_loss
from tests.ranks import run_ranks

RL = LearnerConfig(
    num_rounds=2,
    group_size=4,
    groups_per_round=3,
    inner_updates=2,
    micro_batch_tokens=56,
    lr=1e-3,
    max_grad_norm=0.5,
    reference_sync_rounds=1,
)
SFT = SftConfig(num_labels=12, num_steps=3, batch_size=5, lr=1e-3, num_warmup_steps=0)
# With micro-batches of 20 tokens one rank has more of them than the other.
SFTS: tuple[dict[str, object], ...] = (
    {},
    {"packing": True},
    {"micro_batch_tokens": 20},
    {"micro_batch_tokens": 20, "packing": True, "normalize_by": "slot"},
)
LORAS = {"whole": LoraConfig(), "adapter": LoraConfig(rank=4, alpha=8)}
PLAIN = ShardingConfig()
CHECKPOINTING = ShardingConfig(activation_checkpointing=True)
HALF = ShardingConfig(compute_dtype="bfloat16")


def _documents(batch: RolloutBatch) -> Documents:
    return Documents(
        ids=torch.cat((batch.prompt_ids, batch.completion_ids), dim=1),
        prompt_lengths=batch.prompt_lengths,
        lengths=batch.prompt_lengths + batch.completion_lengths,
        sample_keys=batch.sample_keys,
    )


def _evaluation(policy: ShardedPolicy, batch: RolloutBatch) -> list[float]:
    evaluated = evaluation_loss(policy, _documents(batch), batch_size=4)
    # Small enough that ranks have different numbers of micro-batches.
    cut = evaluation_loss(policy, _documents(batch), batch_size=4, micro_batch_tokens=30)
    assert cut.loss == pytest.approx(evaluated.loss, rel=1e-4)
    return [evaluated.loss, evaluated.loss_at_t[-1]]


def _train(
    policy: ShardedPolicy,
    batch: RolloutBatch,
    resume_from: dict[str, torch.Tensor] | None = None,
    sfts: tuple[dict[str, object], ...] = SFTS,
) -> dict[str, object]:
    metrics: list[dict[str, float]] = []
    for changes in sfts:
        sft = SftLearner(policy, SFT.model_copy(update=changes), _documents(batch), seed=0)
        metrics += [sft.step(step, 1e-3) for step in range(2)]
    learner = Learner(policy, RL)
    if resume_from is not None:
        learner.load_full_state(resume_from)
    for round_index in range(2):
        metrics.append(learner.update(batch, round_index))
        learner.sync_reference(round_index)
    # The last forward has no backward; gathered parameters must be correct nevertheless.
    with policy.without_gradients():
        policy.module(batch.prompt_ids)
    return {
        "weights": policy.full_weights(),
        "adapter": policy.adapter_on_rank_0(),
        "optimizer": learner.full_state(),
        "metrics": metrics,
    }


def _policy(
    config: TransformerConfig,
    lora: LoraConfig,
    sharding: ShardingConfig = PLAIN,
    *,
    on_ranks: bool = False,
) -> ShardedPolicy:
    model = Transformer(config)
    init_weights(model, seed=0)
    mesh = make_mesh("cpu", sharding.workers_per_copy) if on_ranks else None
    return ShardedPolicy(model, mesh, sharding, lora=lora, seed=3)


def _from_meta(
    config: TransformerConfig,
    lora: LoraConfig,
    sharding: ShardingConfig = PLAIN,
    *,
    held_in: torch.dtype = torch.float32,
    rounded_to: torch.dtype = torch.float32,
) -> ShardedPolicy:
    """Build the same policy on ranks from row shards only: no rank ever has the whole policy.

    The weights are rounded to `rounded_to` and stored as `held_in`.
    """
    with torch.device("meta"):
        model = Transformer(config).to(held_in)
    policy = ShardedPolicy(model, make_mesh("cpu"), sharding, lora=lora, seed=3, device=torch.device("cpu"))
    whole = Transformer(config)
    init_weights(whole, seed=0)
    policy.load_full_weights(dict(whole.to(rounded_to).named_parameters()))
    return policy


def _rank(rank: int, port_file: str, config: TransformerConfig, batch: RolloutBatch, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name, lora in LORAS.items():
        policy = _policy(config, lora, on_ranks=True)
        evaluation = _evaluation(policy, batch)
        first = _train(policy, batch)
        shared = [first["optimizer"]]
        dist.broadcast_object_list(shared, src=0)  # In a run every rank reads rank 0's from the checkpoint.
        again = _train(_from_meta(config, lora), batch, shared[0], SFTS[3:])  # type: ignore[arg-type]
        checkpointed = _train(_policy(config, lora, CHECKPOINTING, on_ranks=True), batch)
        half = _train(_policy(config, lora, HALF, on_ranks=True), batch)
        results[name] = {"first": first, "again": again, "checkpointed": checkpointed, "half": half}
        results[name]["evaluation"] = evaluation
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        policy = _from_meta(config, LORAS["adapter"], HALF, held_in=dtype, rounded_to=torch.bfloat16)
        results[name] = _train(policy, batch, sfts=SFTS[3:])
    with patch("learner.parallel.sharding.has_kernel", lambda *_: True):
        policy = _policy(config, LORAS["adapter"], CHECKPOINTING, on_ranks=True)
        evaluation = _evaluation(policy, _ragged(batch))
        results["back to back"] = _train(policy, _ragged(batch)) | {"evaluation": evaluation}
    with patch("learner.parallel.sharding.has_kernel", lambda _device, dtype, _head_dim: dtype is torch.bfloat16):
        computed_in = {sharding: _policy(config, LORAS["whole"], sharding, on_ranks=True) for sharding in (PLAIN, HALF)}
        assert [policy.concatenates_rows for policy in computed_in.values()] == [False, True]
    marks: list[int] = [0, 0]
    dist.all_gather_object(marks, PROGRESS.place.num_marks)
    assert marks[0] == marks[1] > 100, "the less advanced rank is found by these counts"
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory, config: TransformerConfig) -> dict[str, Results]:
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(_rank, str(directory / "rendezvous"), config, _rollouts(), directory / "out.pt", num=2)
    return torch.load(directory / "out.pt", weights_only=True)


@pytest.fixture(params=LORAS)
def lora(request: pytest.FixtureRequest) -> LoraConfig:
    return LORAS[request.param]


@pytest.fixture
def sharded(request: pytest.FixtureRequest, on_two_ranks: dict[str, Results], lora: LoraConfig) -> Results:
    (name,) = [name for name, known in LORAS.items() if known is lora]
    return on_two_ranks[name]


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
        rewards=(rewards := torch.rand(11, generator=generator)),
        reward_parts=rewards[:, None],
        correct=rewards > 0.5,
        truncated=lengths == 8,
        is_stop=completions == 39,
        group_ids=torch.arange(11) // 4,
        step_map=torch.arange(8).expand(11, 8) // 2,
        commit_logp=-torch.rand(11, 8, generator=generator),
        commit_entropy=torch.rand(11, 8, generator=generator),
        fallback=torch.rand(11, 8, generator=generator) < 0.5,
        commit_law_entropy=torch.rand(11, 8, generator=generator),
        num_forwards=torch.full((11,), 4),
        policy_versions=torch.zeros(11, dtype=torch.long),
        step_rewards=torch.rand(11, 4, generator=generator),
        step_answers=torch.randint(0, 38, (11, 4, 8), generator=generator, dtype=torch.int32),
        node_keys=torch.stack((100 + torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5, 5, 6]), torch.arange(11)), dim=1),
    )


def _ragged(batch: RolloutBatch) -> RolloutBatch:
    """The same batch with prompts of one to six tokens."""
    return replace(batch, prompt_lengths=1 + torch.arange(11) * 5 % 6)


@pytest.mark.parametrize("which", ["first", "again"])
def test_two_ranks_equal_one_process(config: TransformerConfig, lora: LoraConfig, sharded: Results, which: str) -> None:
    """Eleven rows on two ranks: the padded odd shard must not change the mean.

    The second time both resume from the state that the two ranks left.
    """
    policy = _policy(config, lora)
    if which == "again":
        single = _train(policy, _rollouts(), sharded["first"]["optimizer"], SFTS[3:])
    else:
        assert sharded["evaluation"] == pytest.approx(_evaluation(policy, _rollouts()), rel=1e-3)
        single = _train(policy, _rollouts())
    _assert_close(sharded[which], single)


def test_packed_rows_equal_padded_rows(config: TransformerConfig, on_two_ranks: dict[str, Results]) -> None:
    """In SFT and in rounds, for an adapter on two ranks with activation checkpointing."""
    policy = _policy(config, LORAS["adapter"])
    evaluation = _evaluation(policy, _ragged(_rollouts()))
    assert on_two_ranks["back to back"]["evaluation"] == pytest.approx(evaluation, rel=1e-3)
    _assert_close(on_two_ranks["back to back"], _train(policy, _ragged(_rollouts())))


def _assert_close(sharded: dict[str, Any], single: dict[str, Any]) -> None:
    for part in ("weights", "adapter", "optimizer"):
        expected = single[part]
        assert sharded[part].keys() == expected.keys()
        for name, tensor in expected.items():
            # On a gradient near zero, Adam amplifies the last bit to part of a step. The bound is a tenth of a step.
            torch.testing.assert_close(sharded[part][name], tensor, atol=1e-4, rtol=1e-3, msg=name)
    for ours, theirs in zip(sharded["metrics"], single["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


# Several copies of the policy, each sharded over several ranks.


def _round(policy: ShardedPolicy, resume_from: dict[str, torch.Tensor]) -> dict[str, Any]:
    learner = Learner(policy, RL)
    learner.load_full_state(resume_from)
    metrics = [learner.update(_rollouts(), 0)]
    return {
        "weights": policy.full_weights(),
        "adapter": policy.adapter_on_rank_0(),
        "optimizer": learner.full_state(),
        "metrics": metrics,
    }


def _copies_rank(
    rank: int, port_file: str, config: TransformerConfig, states: dict[str, dict[str, torch.Tensor]], out: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=4)
    found = {}
    for name, state in states.items():
        policy = _policy(config, LORAS[name], ShardingConfig(workers_per_copy=2), on_ranks=True)
        for parameter in policy.module.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().shape[0] == parameter.shape[0] // 2
        found[name] = _round(policy, state)
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


def test_hybrid_sharding_equals_one_process(config: TransformerConfig, tmp_path: Path) -> None:
    """They resume from the state of one process, and all ranks end bit-identical."""
    states = {name: _round(_policy(config, lora), {})["optimizer"] for name, lora in LORAS.items()}
    run_ranks(_copies_rank, str(tmp_path / "at"), config, states, tmp_path, num=4)
    first, *others = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(4))
    for name, lora in LORAS.items():
        _assert_close(first[name], _round(_policy(config, lora), states[name]))
        for other in others:
            assert other[name]["metrics"] == first[name]["metrics"]
            assert all(torch.equal(other[name]["weights"][at], weight) for at, weight in first[name]["weights"].items())


def _assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["metrics"] == theirs["metrics"]
    for part in ("weights", "adapter", "optimizer"):
        assert ours[part].keys() == theirs[part].keys()
        assert [name for name in theirs[part] if not torch.equal(ours[part][name], theirs[part][name])] == []


def test_activation_checkpointing_is_bit_identical(
    config: TransformerConfig, lora: LoraConfig, sharded: Results
) -> None:
    single, checkpointed = (_train(_policy(config, lora, sharding), _rollouts()) for sharding in (PLAIN, CHECKPOINTING))
    _assert_same_bits(checkpointed, single)
    _assert_same_bits(sharded["checkpointed"], sharded["first"])


def test_activation_checkpointing_computes_each_block_twice(config: TransformerConfig) -> None:
    ids = torch.arange(20).view(2, 10)
    counts = []
    for sharding in (PLAIN, CHECKPOINTING):
        policy, runs = _policy(config, LoraConfig(), sharding), []
        for block in policy.module.blocks:
            block.attn_norm.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        policy.module(ids).sum().backward()
        counts.append(len(runs))
    assert counts == [2, 4]


def test_half_precision_is_close_with_float32_weights(sharded: Results) -> None:
    exact, half = sharded["first"], sharded["half"]
    assert {tensor.dtype for part in ("weights", "adapter") for tensor in half[part].values()} == {torch.float32}
    assert half["metrics"] != exact["metrics"]
    for ours, theirs in zip(half["metrics"], exact["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05, abs=0.01)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    # Not representable in bfloat16: the stored and updated weights are float32.
    name = "blocks.0.attn.q_proj.weight"
    assert not torch.equal(half["weights"][name].bfloat16().float(), half["weights"][name])


@pytest.mark.parametrize("config_of", [HALF, ShardingConfig(cpu_offload=True)])
def test_fsdp_options_are_refused_without_fsdp(config: TransformerConfig, config_of: ShardingConfig) -> None:
    with pytest.raises(ValueError, match="compute_dtype and cpu_offload are FSDP's"):
        _policy(config, LoraConfig(), config_of)


def test_full_weights_round_trip(config: TransformerConfig) -> None:
    policy, other = (ShardedPolicy(Transformer(config), None) for _ in range(2))
    other.load_full_weights(policy.full_weights())
    for name, tensor in policy.full_weights().items():
        assert torch.equal(other.full_weights()[name], tensor)


def test_full_weights_are_copies(config: TransformerConfig) -> None:
    policy = ShardedPolicy(Transformer(config), None)
    taken = policy.full_weights()
    before = taken["head.weight"].clone()
    with torch.no_grad():
        policy.module.head.weight.add_(1)
    assert torch.equal(taken["head.weight"], before)


# Every algorithm on 2 or 4 ranks has the gradient of one process. Losses that look beyond a row run on 4.

_WIDE = ("diffu-grpo-parity", "wd1", "tracerl", "stabledrl", "vrpo", "tba")
# Each has the estimator and the objective of another one.
_VARIANTS = ("unigrpo", "spg-eubo", "gdpo", "ebpo", "cj-grpo", "agrpo", "justgrpo", "forkgrpo")
_OTHERS = tuple(name for name in ALGORITHMS if name not in (*_WIDE, *_VARIANTS))
# Two algorithms, one for each number of ranks, also with the denoising loss of correct completions.
IMITATING = ("wd1", "coupled-grpo")


# Some also with minibatches, in which not every rank has a row or a group.
MINIBATCHES = {"stabledrl": 2, "tracerl": 3, "espo": 5}


class _Recorder:
    """A fake optimizer: records the full gradients of every step."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self._policy = policy
        self.gradients: list[dict[str, torch.Tensor]] = []

    def rollback(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, lr: float, max_grad_norm: float, loss: torch.Tensor) -> StepResult:
        named = dict(self._policy.module.named_parameters())
        self.gradients.append({name: on_cpu(gathered(p.grad)) for name, p in named.items() if p.grad is not None})
        self._policy.module.zero_grad()
        return StepResult(loss=0.0, grad_norm=0.0)


def _gradients(policy: ShardedPolicy, name: str, batch: RolloutBatch, num_minibatches: int) -> dict[str, object]:
    settings = {"algorithm": name, "num_rounds": 1, "inner_updates": 2, "micro_batch_tokens": 60}
    settings["num_minibatches"] = num_minibatches
    if name.startswith("tracerl"):
        settings["filters"] = {"min_accuracy": 0.0, "max_accuracy": 1.0}
    if name in IMITATING or num_minibatches > 1:
        settings["imitation_coef"] = 0.2
    block_length = 1 if name == "justgrpo" else 4
    sampler = SamplerFacts(block_length=block_length, has_fallback=True, has_varying_steps=name not in _EVEN)
    if name == "d-treerpo":
        # Its consistency loss begins in the second round.
        settings |= {"num_rounds": 2, "group_size": 4, "estimator": {"branches": (2, 2)}}
    learner = Learner(policy, LearnerConfig.model_validate(settings), sampler)
    recorder = _Recorder(policy)
    learner.optimizer = recorder  # type: ignore[assignment]
    return {"metrics": learner.update(batch, learner.config.num_rounds - 1), "gradients": recorder.gradients}


_EVEN = ("d-treerpo", "mdpo")
"""Methods whose completions have a fixed number of denoise steps."""


def _all_gradients(policy: ShardedPolicy, batch: RolloutBatch, names: tuple[str, ...]) -> dict[str, dict[str, object]]:
    found = {name: _gradients(policy, name, batch, 1) for name in names}
    some = {name: MINIBATCHES[name] for name in names if name in MINIBATCHES}
    return found | {f"{name} in {count}": _gradients(policy, name, batch, count) for name, count in some.items()}


def _gradient_rank(
    rank: int, world_size: int, names: tuple[str, ...], port_file: str, config: TransformerConfig, out: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=world_size)
    model = Transformer(config)
    init_weights(model, seed=0)
    found = _all_gradients(ShardedPolicy(model, make_mesh("cpu")), _rollouts(), names)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "names"), [(4, _WIDE), (2, _OTHERS), pytest.param(2, _VARIANTS, marks=pytest.mark.nightly)]
)
def test_every_algorithms_gradient_is_independent_of_the_number_of_ranks(
    config: TransformerConfig, tmp_path: Path, world_size: int, names: tuple[str, ...]
) -> None:
    """Three groups on four ranks: where groups stay whole, one rank has no rows but joins every collective."""
    out = tmp_path / "out.pt"
    run_ranks(_gradient_rank, world_size, names, str(tmp_path / "at"), config, out, num=world_size)
    sharded = torch.load(out, weights_only=True)
    model = Transformer(config)
    init_weights(model, seed=0)
    for name, single in _all_gradients(ShardedPolicy(model, None), _rollouts(), names).items():
        assert ("imitation_loss" in single["metrics"]) == (name in IMITATING or " in " in name)  # type: ignore[operator]
        assert sharded[name]["metrics"] == pytest.approx(single["metrics"], rel=1e-4, abs=1e-6), name
        for ours, expected in zip(sharded[name]["gradients"], single["gradients"], strict=True):  # type: ignore[call-overload]
            assert ours.keys() == expected.keys()
            for parameter, gradient in expected.items():
                scale = max(1.0, float(gradient.abs().max()))
                torch.testing.assert_close(
                    ours[parameter], gradient, atol=1e-6 * scale, rtol=0, msg=f"{name} {parameter}"
                )


# Steps with LoRA: likelihoods of single tokens, of whole completions with the adapter-off reference, bounds compared
# within a group, and divergences from the adapter-off policy.

ADAPTED = ("stepmerge", "espo", "stabledrl", "d-opsd")


def _adapted(config: TransformerConfig, batch: RolloutBatch, *, on_ranks: bool) -> dict[str, dict[str, Any]]:
    found = {}
    for name in ADAPTED:
        policy = _policy(config, LORAS["adapter"], on_ranks=on_ranks)
        settings = {"algorithm": name, "num_rounds": 1, "inner_updates": 3, "micro_batch_tokens": 60, "lr": 1e-3}
        learner = Learner(policy, LearnerConfig.model_validate(settings), SamplerFacts(block_length=4))
        metrics = learner.update(batch, 0)
        found[name] = {"adapter": policy.adapter_on_rank_0(), "weights": policy.full_weights(), "metrics": metrics}
    return found


def _adapted_rank(rank: int, port_file: str, config: TransformerConfig, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    found = _adapted(config, _rollouts(), on_ranks=True)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def test_a_sharded_adapters_step_equals_one_process(config: TransformerConfig, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    run_ranks(_adapted_rank, str(tmp_path / "at"), config, out, num=2)
    sharded = torch.load(out, weights_only=True)
    start = _policy(config, LORAS["adapter"]).full_weights()
    for name, single in _adapted(config, _rollouts(), on_ranks=False).items():
        assert sharded[name]["metrics"] == pytest.approx(single["metrics"], rel=1e-3, abs=1e-5), name
        for part in ("adapter", "weights"):
            assert sharded[name][part].keys() == single[part].keys()
            for parameter, tensor in single[part].items():
                # A tenth of a step, as above.
                torch.testing.assert_close(
                    sharded[name][part][parameter], tensor, atol=1e-4, rtol=1e-3, msg=f"{name} {parameter}"
                )
        assert any(not torch.equal(tensor, start[parameter]) for parameter, tensor in single["weights"].items())


def _late_rank(rank: int, port_file: str, out: Path, is_first: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=3)
    policy = ShardedPolicy(Transformer(_tiny()), make_mesh("cpu"))
    if not is_first:
        policy.barrier("round 6", timeout_s=60)
    if rank == 2:
        deadline = time.monotonic() + 60
        while not (out / "said").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return
    try:
        policy.barrier("round 7", timeout_s=4)
    except TimeoutError as error:
        (out / "said").write_text(str(error))
    except RuntimeError:
        pass


def _tiny() -> TransformerConfig:
    return TransformerConfig(
        vocab_size=8,
        d_model=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        mlp_hidden_size=8,
        max_sequence_length=8,
        mask_token_id=6,
        eos_token_id=7,
        pad_token_id=7,
    )


@pytest.mark.parametrize(("is_first", "who"), [(False, "rank 2"), (True, "some rank")])
def test_a_late_rank_times_out_and_is_named_except_at_the_first_barrier(
    tmp_path: Path, is_first: bool, who: str
) -> None:
    run_ranks(_late_rank, str(tmp_path / "at"), tmp_path, is_first, num=3)
    assert (tmp_path / "said").read_text() == f"round 7: {who} of the learner did not arrive within 4 s"


def test_a_frozen_bfloat16_base_is_bit_identical(on_two_ranks: dict[str, Any]) -> None:
    """If ranks compute in half precision and it represents the weights exactly, every weight, moment and loss is
    bit-identical."""
    in_float32, in_half = on_two_ranks["float32"], on_two_ranks["bfloat16"]
    assert in_half["metrics"] == in_float32["metrics"]
    for part in ("weights", "adapter", "optimizer"):
        assert in_half[part].keys() == in_float32[part].keys()
        for name, tensor in in_half[part].items():
            assert tensor.dtype == in_float32[part][name].dtype
            assert torch.equal(tensor, in_float32[part][name]), name
