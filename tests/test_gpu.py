"""Learner and sampler classes on a GPU, or a simulated one, compute what they compute on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.counting import OpCounter
from benchmarks.models import Shape, random_adapter
from benchmarks.rounds import Setting, make_round
from learner.algorithms import ALGORITHMS
from learner.counter import uniform
from learner.estimators import Views, token_logps
from learner.hardware import indexed_device, limit_memory
from learner.learner import Learner
from learner.model.adapter import attach_adapters
from learner.model.config import TransformerConfig
from learner.model.lora import copy_sharing_base, set_adapter
from learner.model.networks import make_model
from learner.model.scoring import score_targets
from learner.model.targets import Targets
from learner.model.transformer import Transformer, init_weights
from learner.parallel import sharding
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig
from learner.sft.config import SftConfig
from learner.sft.documents import TokenizedExample, make_documents
from learner.sft.learner import SftLearner
from rollout import sampler as rollout_sampler
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.learner.methods.test_algorithms import algorithm_config, algorithm_sampler
from tests.simulated.stand_in_gpu import stand_in_gpu

Placed = Callable[[Transformer], Transformer]

_ROUND = Setting(
    shape=Shape(d_model=32, num_layers=2, num_heads=4, vocab_size=38),
    prompt_tokens=6,
    gen_length=8,
    num_groups=2,
    group_size=4,
)
# One to six tokens.
_PROMPT_LENGTHS = torch.tensor([1, 6, 3, 5, 2, 6, 4, 4])
_OF_ROUND = {"group_size": 4, "groups_per_round": 2, "num_minibatches": 1}


@pytest.fixture
def placed() -> Iterator[Placed]:
    """Yield a function that copies a policy to the GPU of this machine, or to a simulated one."""
    with nullcontext() if torch.cuda.is_available() else stand_in_gpu():
        yield lambda model: copy.deepcopy(model).cuda()


@pytest.mark.filterwarnings("ignore")
def test_grouped_experts_equal_those_on_the_cpu(moe_config: TransformerConfig, placed: Placed) -> None:
    model = make_model(moe_config)
    init_weights(model, seed=0)
    ids = torch.arange(24).view(2, 12)
    on_gpu = placed(model)
    found, expected = on_gpu(ids.cuda()), model(ids)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
    found.sum().backward()
    expected.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(on_gpu.get_parameter(name).grad.cpu(), parameter.grad, atol=1e-3, rtol=1e-3)


def test_uniform_draws_are_bit_identical(placed: Placed) -> None:
    keys = torch.arange(100_000)
    drawn = uniform(torch.tensor(7).cuda(), keys.cuda(), 3)
    assert drawn.is_cuda
    assert torch.equal(drawn.cpu(), uniform(torch.tensor(7), keys, 3))


def test_greedy_completions_equal_those_on_the_cpu(policy: Transformer, placed: Placed) -> None:
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0)
    requests = [Request(prompt_ids=tuple(range(1, 2 + row)), params=params, seed=row) for row in range(5)]
    on_cpu = Sampler(policy, 0).generate(requests)
    on_gpu = Sampler(placed(policy), 0).generate(requests)
    assert [c.token_ids.tolist() for c in on_gpu] == [c.token_ids.tolist() for c in on_cpu]


@pytest.mark.parametrize(
    ("changes", "steps_per_sync"),
    [
        ({"threshold": 0.3}, 1),
        ({"threshold": 0.3}, 4),
        ({"factor": 1.1}, 1),
        ({"entropy_bound": 1.5}, 4),
        ({"schedule": "random"}, 1),
        ({"temperature": 0.8, "top_p": 0.7, "top_k": 9}, 1),
        ({"temperature": 0.8, "top_p": 0.7, "top_k": 9}, 4),
        ({"cfg_scale": 1.0}, 4),
        ({"cache": "dual", "cache_refresh_steps": 3}, 1),
        ({"cache": "prefix"}, 1),
        ({"drawing": "sample_then_select", "temperature": 0.7}, 4),
        ({"forbidden_ids": (1, 2, 3)}, 1),
    ],
)
def test_completions_equal_those_on_the_cpu_for_all_parameters(
    policy: Transformer, changes: dict[str, Any], steps_per_sync: int, placed: Placed
) -> None:
    engine = EngineConfig(num_slots=3, steps_per_sync=steps_per_sync)
    base: dict[str, Any] = {"gen_length": 8, "block_length": 4, "num_denoise_steps": 4, "temperature": 0.0}
    params = SamplingParams(**base | changes)
    requests = [Request(prompt_ids=tuple(range(1, 2 + row)), params=params, seed=row) for row in range(5)]
    on_cpu = Sampler(policy, 0).generate(requests)
    on_gpu = Sampler(placed(policy), 0, engine).generate(requests)
    assert [c.token_ids.tolist() for c in on_gpu] == [c.token_ids.tolist() for c in on_cpu]
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.commit_logp == pytest.approx(other.commit_logp, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "steps_per_sync"),
    [
        ({"top_p": 0.7, "top_k": 9}, 1),
        ({"threshold": 0.3, "temperature": 0.0}, 4),
        ({"schedule": "random", "forbidden_ids": (1, 2)}, 1),
        ({"cfg_scale": 1.0}, 1),
        ({"cache": "dual", "cache_refresh_steps": 3}, 1),
    ],
)
@pytest.mark.parametrize("concatenates_rows", [False, True])
def test_the_host_synchronizes_once_per_step_entry_and_exit(
    policy: Transformer,
    changes: dict[str, Any],
    steps_per_sync: int,
    placed: Placed,
    concatenates_rows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_sampler, "has_kernel", lambda *_: concatenates_rows)
    base: dict[str, Any] = {"gen_length": 4, "block_length": 4, "num_denoise_steps": 2, "temperature": 0.9}
    params = SamplingParams(**base | changes, stop_ids=())
    requests = [Request(prompt_ids=tuple(range(3, 5 + row % 2)), params=params, seed=row) for row in range(3)]
    batch = Sampler(placed(policy), 0, EngineConfig(num_slots=2, steps_per_sync=steps_per_sync)).open(requests)
    with OpCounter() as counter:
        while batch.num_waiting or batch.num_running:
            counter.reset()
            num_waiting = batch.num_waiting
            has_left = bool(batch.step())
            assert counter.num_launches > 100, "it counts"
            assert counter.num_waits == 1 + (batch.num_waiting < num_waiting) + has_left
            assert counter.num_blocking_uploads == 0


def test_a_resumed_request_enters_without_host_synchronization(policy: Transformer, placed: Placed) -> None:
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, stop_ids=())
    request = Request(prompt_ids=(3, 4), params=params, seed=1)
    whole = Sampler(policy, 0).generate([request])[0]
    earlier = Sampler(policy, 0).open([request])
    while not earlier.num_committed().get(0):
        earlier.step()
    committed = earlier.progress([0])[0].committed
    batch = Sampler(placed(policy), 0).open([replace(request, committed=committed)])
    with OpCounter() as counter:
        batch.step()
    assert (counter.num_waits, counter.num_blocking_uploads) == (2, 0)
    ended = [batch.step() for _ in range(3)][-1]
    assert ended[0][1].token_ids.tolist() == whole.token_ids.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_bfloat16_policy_samples_like_the_eager_one(policy: Transformer) -> None:
    half = copy.deepcopy(policy).to("cuda", torch.bfloat16)
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0)
    requests = [Request(prompt_ids=(3, 4, 5), params=params, seed=row) for row in range(4)]
    eager = Sampler(half, 0).generate(requests)
    compiled = Sampler(half, 0, EngineConfig(compile=True)).generate(requests)
    same = [one.token_ids == other.token_ids for one, other in zip(eager, compiled, strict=True)]
    assert sum(map(float, (row.mean() for row in same))) / 4 > 0.9, "fusion rounds otherwise"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_cuda_graphs_capture_steps_that_write_to_the_kv_cache(policy: Transformer) -> None:
    from torch._dynamo.utils import counters

    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0, cache="dual")
    requests = [Request(prompt_ids=(3, 4, 5), params=params, seed=row) for row in range(4)]
    sampler = Sampler(copy.deepcopy(policy).to("cuda", torch.bfloat16), 0, EngineConfig(compile=True))
    counters.clear()
    found = [[one.token_ids.tolist() for one in sampler.generate(requests)] for _ in range(3)]
    assert counters["inductor"]["cudagraph_skips"] == 0
    # Captured as a CUDA graph, then replayed.
    assert found[1:] == found[:1] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_update_equals_the_eager_one(policy: Transformer) -> None:
    batch, config = make_round(_ROUND), algorithm_config("diffu-grpo", **_OF_ROUND, filters={}, inner_updates=1)
    eager, compiled = (copy.deepcopy(policy).cuda() for _ in range(2))
    metrics = [
        Learner(ShardedPolicy(model, None, sharding), config).update(batch, 0)
        for model, sharding in ((eager, ShardingConfig()), (compiled, ShardingConfig(compile=True)))
    ]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-2, abs=1e-4)
    for name, tensor in eager.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name), tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
def test_a_fused_policy_samples_and_learns_like_the_eager_one(policy: Transformer) -> None:
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0, cache="dual")
    requests = [Request(prompt_ids=tuple(range(3, 6 + row)), params=params, seed=row) for row in range(4)]
    half = copy.deepcopy(policy).to("cuda", torch.bfloat16)
    eager = Sampler(half, 0).generate(requests)
    fused = Sampler(copy.deepcopy(half), 0, EngineConfig(compile="elementwise")).generate(requests)
    same = [one.token_ids == other.token_ids for one, other in zip(eager, fused, strict=True)]
    assert sum(map(float, (row.mean() for row in same))) / 4 > 0.9, "fusion rounds otherwise"
    batch, config = make_round(_ROUND), algorithm_config("diffu-grpo", **_OF_ROUND, filters={}, inner_updates=1)
    metrics = [
        Learner(ShardedPolicy(copy.deepcopy(policy).cuda(), None, sharding), config).update(batch, 0)
        for sharding in (ShardingConfig(), ShardingConfig(compile="elementwise"))
    ]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_equals_that_on_the_cpu(policy: Transformer, placed: Placed, name: str) -> None:
    batch = make_round(_ROUND)
    config = algorithm_config(name, micro_batch_tokens=90, filters={}, **_OF_ROUND, inner_updates=1)
    on_gpu = placed(policy)
    metrics = [
        Learner(ShardedPolicy(model, None), config, algorithm_sampler(name)).update(batch, 0)
        for model in (policy, on_gpu)
    ]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-2, abs=1e-4)
    for parameter_name, tensor in policy.named_parameters():
        there = on_gpu.get_parameter(parameter_name)
        assert there.is_cuda
        # Adam takes a full step on a gradient near zero, whose last bits differ.
        torch.testing.assert_close(there.cpu(), tensor, atol=1e-4, rtol=1e-3, msg=parameter_name)


@pytest.mark.parametrize("name", ["diffu-grpo", "spg", "tracerl"])
def test_a_packed_update_equals_the_padded_one_on_the_cpu(
    policy: Transformer, placed: Placed, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts of unequal lengths: padded on the CPU, packed without padding on the GPU, where float32 runs row by
    row."""
    batch = replace(make_round(_ROUND), prompt_lengths=_PROMPT_LENGTHS)
    config = algorithm_config(name, micro_batch_tokens=90, filters={}, **_OF_ROUND, inner_updates=1)
    on_gpu, widths = placed(policy), []
    padded = Learner(ShardedPolicy(policy, None), config, algorithm_sampler(name)).update(batch, 0)
    monkeypatch.setattr(sharding, "has_kernel", lambda device, *_: device.type == "cuda")
    on_gpu.register_forward_pre_hook(lambda _module, args: widths.append(tuple(args[0].shape)))
    found = Learner(ShardedPolicy(on_gpu, None), config, algorithm_sampler(name)).update(batch, 0)
    assert any(rows == 1 and width > 14 for rows, width in widths), "a canvas has at most 14 slots"
    assert found == pytest.approx(padded, rel=1e-2, abs=1e-4)
    for parameter_name, tensor in policy.named_parameters():
        there = on_gpu.get_parameter(parameter_name)
        torch.testing.assert_close(there.cpu(), tensor, atol=1e-4, rtol=1e-3, msg=parameter_name)


def test_ragged_rows_cause_no_host_synchronization(policy: Transformer, placed: Placed) -> None:
    """No host-device synchronization, padded or packed: the host knows the lengths."""
    slots = torch.tensor([0, 5, 6, 12, 14])
    views = Views(
        ids=torch.arange(18).view(3, 6),
        lengths=torch.tensor([6, 1, 4]),
        slots=slots,
        scored=torch.arange(5),
        targets=slots,
    )
    on_gpu, launches = placed(policy), []
    for concatenates_rows in (False, True):
        with OpCounter() as counter:
            token_logps(on_gpu, replace(views, concatenates_rows=concatenates_rows)).sum().backward()
        assert (counter.num_waits, counter.num_blocking_uploads) == (0, 0)
        launches.append(counter.num_launches)
    assert launches[1] != launches[0] > 100, "it counts"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_varlen_attention_is_close_to_padding_in_bfloat16(config: TransformerConfig, kv_heads: int) -> None:
    """The packed bfloat16 forward is at most 1.5 times as far from float32 as the padded one, plus 0.02 nats."""
    wide = {"d_model": 64, "num_kv_heads": kv_heads, "max_sequence_length": 512}
    exact = make_model(config.model_copy(update=wide))
    init_weights(exact, seed=0)
    half = copy.deepcopy(exact).to(torch.bfloat16).cuda()
    exact = exact.cuda()
    lengths = torch.tensor([300, 1, 17, 128, 129])
    # The fourth row has no scored slots.
    slots = torch.cat([row * 300 + torch.arange(min(int(lengths[row]), 40)) for row in (0, 1, 2, 4)])
    targets = torch.arange(len(slots)) % 38
    ids = torch.randint(0, 38, (5, 300), generator=torch.Generator().manual_seed(0))
    views = Views(ids=ids, lengths=lengths, slots=slots, scored=torch.arange(len(slots)), targets=targets)
    assert ShardedPolicy(half, None).concatenates_rows
    assert not ShardedPolicy(exact, None).concatenates_rows

    def off(model: Transformer, concatenates_rows: bool) -> dict[str, float]:
        logps_N = token_logps(model, replace(views, concatenates_rows=concatenates_rows))
        model.zero_grad()
        logps_N.mean().backward()
        found = {name: weight.grad.float() for name, weight in model.named_parameters()}
        gradients = {
            name: float((found[name] - weight.grad).norm() / weight.grad.norm())
            for name, weight in exact.named_parameters()
            if weight.grad is not None
        }
        return {"logps": float((logps_N.detach() - expected_N).abs().max()), **gradients}

    expected_N = token_logps(exact, views)
    expected_N.mean().backward()
    expected_N = expected_N.detach()
    padded, back_to_back = off(half, False), off(half, True)
    for name, distance in back_to_back.items():
        assert distance < 1.5 * padded[name] + 0.02, name


@pytest.mark.parametrize(
    ("name", "of_losses", "tokens"),
    [
        ("diffu-grpo", 0, 60),
        # Its loss has units of several kinds.
        ("mapg", 0, 60),
        # Each loss picks its pairs once for all micro-batches. There are two, as a group spans several micro-batches.
        ("vrpo", 2, 300),
    ],
)
def test_the_host_synchronizes_once_per_optimizer_step(
    policy: Transformer, placed: Placed, name: str, of_losses: int, tokens: int
) -> None:
    num_waits, num_uploads = [], []
    for inner_updates in (1, 2):
        config = algorithm_config(name, micro_batch_tokens=tokens, filters={}, **_OF_ROUND, inner_updates=inner_updates)
        trained = Learner(ShardedPolicy(placed(policy), None), config, algorithm_sampler(name))
        with OpCounter() as counter:
            trained.update(make_round(_ROUND), 0)
        num_waits.append(counter.num_waits)
        num_uploads.append(counter.num_blocking_uploads)
    assert num_waits[1] - num_waits[0] == 1 + of_losses
    assert num_uploads == [0, 0]


@pytest.mark.parametrize("packing", [False, True])
def test_the_host_synchronizes_once_per_sft_step(policy: Transformer, placed: Placed, packing: bool) -> None:
    examples = [TokenizedExample(prompt_ids=(3,), completion_ids=(4, 5) * n, num_slots=2 * n + 1) for n in range(1, 5)]
    documents = make_documents(examples, 2, trains_padding=False)
    settings = {"num_labels": 4, "num_steps": 1, "batch_size": 4, "eos_padding": "ignored", "packing": packing}
    config = SftConfig.model_validate(settings)
    losses = []
    for model in (policy, placed(policy)):
        with OpCounter() as counter:
            trained = SftLearner(ShardedPolicy(copy.deepcopy(model), None), config, documents, seed=0)
            losses.append(trained.step(0, 1e-3)["loss"])
    assert counter.num_launches > 100, "it counts"
    assert (counter.num_waits, counter.num_blocking_uploads) == (1, 0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_adapters_are_moved_to_the_policys_device(policy: Transformer, placed: Placed) -> None:
    """Adapters of a version arrive on the CPU, as do those of earlier stages."""
    start, adapter, other = (random_adapter(policy, rank) for rank in (3, 4, 4))
    on_gpu, ids = placed(policy), torch.arange(12).view(1, 12)
    for model in (policy, on_gpu):
        attach_adapters(model, adapter.matrices, 0.5, start)
    sharing = copy_sharing_base(on_gpu)
    set_adapter(sharing, other.matrices, 0.5)
    with torch.no_grad():
        expected = policy(ids)
        torch.testing.assert_close(on_gpu(ids.cuda()).cpu(), expected, atol=1e-4, rtol=1e-3)
        assert not torch.allclose(sharing(ids.cuda()).cpu(), expected, atol=1e-3)
    assert all(matrix.is_cuda for matrix in (*on_gpu.parameters(), *on_gpu.buffers(), *sharing.parameters()))


def test_the_simulated_gpu_refuses_to_mix_devices(placed: Placed) -> None:
    """Otherwise the tests above would prove nothing about device placement."""
    there, here = torch.ones(3).cuda(), torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        there + here
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.where(there > 0, there, here)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert (there * torch.tensor(2.0)).tolist() == [2.0] * 3, "a number may be anywhere"
    assert there[torch.tensor([0])].is_cuda, "as an index may"


def test_limit_memory_accepts_the_indexed_device(placed: Placed) -> None:
    """Tensors name such a device, and `indexed_device` returns it."""
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_per_process_memory_fraction(0.9, torch.device("cuda"))
    device = indexed_device("cuda")
    limit_memory(device, 0.9)
    assert torch.ones(1).cuda().device == device != torch.device("cuda")
    assert [indexed_device(name) for name in ("cuda:0", "cuda:1", "cpu")] == [
        device,
        torch.device("cuda:1"),
        torch.device("cpu"),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_float32_head_on_bfloat16_equals_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    x_MD, weight_VD = (torch.randn(size, 64, generator=generator).bfloat16() for size in (33, 500))
    slots = torch.arange(33)
    targets = Targets(slot=slots, token=slots, float32_head=True)
    exact_N = score_targets(x_MD, weight_VD, targets)
    on_gpu = replace(targets, slot=slots.cuda(), slot_on_host=slots, token=slots.cuda())
    found_N = score_targets(x_MD.cuda(), weight_VD.cuda(), on_gpu)
    torch.testing.assert_close(found_N.cpu(), exact_N, atol=1e-4, rtol=1e-5)
