"""The sampler against the reference implementation (slow.py) and the original code's generations."""

import copy
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.replay import replay
from learner.counter import uniform
from learner.model.checkpoint import load_policy
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from rollout import step
from rollout.batch_state import BatchState
from rollout.config import EngineConfig
from rollout.request import Completion, FinishReason, Request, SamplingParams
from rollout.sampler import Sampler
from rollout.token_sampling import sample_tokens
from tests.rollout.slow import Slow, sample

BASE: dict[str, Any] = {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8, "temperature": 1.0}
WARM = SamplingParams(**BASE)
PARAMS = SamplingParams(**BASE | {"temperature": 0.0})


def _requests(params: SamplingParams, count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 9, 5, 9, 1, 12]
    prompts = [tuple(torch.randint(0, 38, (length,), generator=generator).tolist()) for length in lengths]
    return [Request(prompt_ids=prompts[i % 6], params=params, seed=100 + i) for i in range(count)]


def _check_equal(completion: Completion, slow: Slow, atol: float = 2e-5) -> None:
    denoised = len(completion.token_ids)
    assert completion.token_ids.tolist() == slow.tokens[:denoised]
    assert completion.step_map.tolist() == slow.step_map[:denoised]
    assert completion.fallback.tolist() == slow.fallback[:denoised]
    assert completion.commit_logp == pytest.approx(slow.logp[:denoised], abs=atol)
    assert completion.commit_logp_raw == pytest.approx(slow.logp_raw[:denoised], abs=atol)
    assert completion.commit_entropy == pytest.approx(slow.entropy[:denoised], abs=atol)
    assert completion.commit_law_entropy == pytest.approx(slow.distribution_entropy[:denoised], abs=atol)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 2),
        ({"num_denoise_steps": 6}, 3),
        ({"schedule": "random", "num_denoise_steps": 16}, 1),
        ({"threshold": 0.3}, 8),
        ({"schedule": "left_to_right", "threshold": 0.4}, 8),
    ],
)
def test_a_step_draws_only_as_many_slots_as_it_may_commit(
    policy: Transformer, changes: dict[str, object], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(step, "sample_tokens", lambda *args: (drawn.append(len(args[1])), sample_tokens(*args))[1])
    requests = _requests(SamplingParams(**{**BASE, **changes}), 3)
    Sampler(policy, 0, EngineConfig(static_shapes=True)).open(requests).step()
    assert drawn == [3 * most]


SCHEDULES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "warm": {},
    "two steps": {"num_denoise_steps": 2},
    "threshold": {"threshold": 0.3},
    "factor": {"factor": 1.1},
    "entropy bound": {"entropy_bound": 1.5},
    "random": {"schedule": "random"},
    "left to right": {"schedule": "left_to_right"},
    "left to right with fallback": {"schedule": "left_to_right", "threshold": 0.4},
    "sample then select": {"drawing": "sample_then_select"},
    "sample then select above a threshold": {"drawing": "sample_then_select", "threshold": 0.2},
    "guidance": {"cfg_scale": 1.5, "temperature": 0.0},
    "top-p": {"top_p": 0.6},
    "top-k": {"top_k": 3, "temperature": 1.7},
    "forbidden": {"forbidden_ids": (1, 2, 3, 4, 5, 6, 7), "threshold": 0.3},
    "no stop": {"stop_ids": (), "temperature": 3.0},
    "other stops": {"stop_ids": (4, 17), "temperature": 2.0},
}


@pytest.mark.parametrize("changes", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("engine", [EngineConfig(), EngineConfig(num_slots=2, static_shapes=True, steps_per_sync=3)])
def test_a_ragged_batch_equals_the_slow_sampler(
    policy: Transformer, changes: dict[str, object], engine: EngineConfig
) -> None:
    params = SamplingParams(**{**BASE, **changes})
    requests = _requests(params)
    for request, completion in zip(requests, Sampler(policy, 7, engine).generate(requests), strict=True):
        slow = sample(policy, request)
        _check_equal(completion, slow)
        assert completion.policy_version == 7
        last = completion.step_map.max()
        assert completion.num_forwards == (last + 1) * (2 if params.cfg_scale else 1)


def test_different_requests_share_a_batch(policy: Transformer) -> None:
    """Different lengths, blocks, schedules, temperatures and fixed tokens in three slots, refilled as rows finish."""
    prompts = [request.prompt_ids for request in _requests(PARAMS)]
    requests = [
        Request(
            prompt_ids=prompts[index % 6],
            params=SamplingParams(**{**SIZES[index % len(SIZES)], **changes}),
            seed=index,
            fixed_tokens={1: 7, 5: 9} if index % 3 == 0 else {},
        )
        for index, changes in enumerate(SCHEDULES.values())
    ]
    sampler = Sampler(policy, 0, EngineConfig(num_slots=3))
    arrived: list[int] = []
    completions = sampler.generate(requests, lambda index, _: arrived.append(index))
    assert sorted(arrived) == list(range(len(requests)))
    assert arrived != sorted(arrived), "who is done first leaves first"
    for request, completion in zip(requests, completions, strict=True):
        _check_equal(completion, sample(policy, request))
    busy = sampler.counts.num_rows / sampler.counts.num_forwards
    assert busy > 2, "free slots are filled at once"


SIZES: list[dict[str, Any]] = [
    {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8, "temperature": 1.0},
    {"gen_length": 24, "block_length": 6, "num_denoise_steps": 8, "temperature": 0.0},
    {"gen_length": 8, "block_length": 8, "num_denoise_steps": 8, "temperature": 0.6},
]


def test_completions_do_not_depend_on_their_neighbours(policy: Transformer) -> None:
    requests = _requests(WARM)
    together = Sampler(policy, 0).generate(requests)
    for request, completion in zip(requests, together, strict=True):
        (alone,) = Sampler(policy, 0).generate([request])
        assert alone.token_ids.tolist() == completion.token_ids.tolist()
    backwards = Sampler(policy, 0).generate(requests[::-1])
    assert [c.token_ids.tolist() for c in backwards[::-1]] == [c.token_ids.tolist() for c in together]


@pytest.mark.parametrize("is_static", [False, True])
def test_rows_with_equal_canvases_share_a_forward(policy: Transformer, is_static: bool) -> None:
    """At every step: canvases are equal if their committed tokens are, no matter in which row or step they were
    committed."""
    params = WARM.model_copy(update={"temperature": 0.3})
    sampler = Sampler(policy, 0, EngineConfig(static_shapes=is_static))
    group = [replace(request, seed=seed) for request in _requests(params)[1:3] for seed in range(6)]
    completions = sampler.generate(group)
    for request, completion in zip(group, completions, strict=True):
        _check_equal(completion, sample(policy, request))
    canvases = {
        (step, request.prompt_ids, tuple(np.where(done.step_map < step, done.token_ids, -1)))
        for request, done in zip(group, completions, strict=True)
        for step in range(done.step_map.max() + 1)
    }
    num_alone = sum(int(completion.step_map.max()) + 1 for completion in completions)
    assert len(canvases) < num_alone - (len(group) - 2), "rows share more than their first forward"
    assert sampler.counts.num_rows == len(canvases)


def test_canvases_with_equal_hashes_are_compared(policy: Transformer) -> None:
    slots = BatchState(6, policy.config, torch.device("cpu"))
    prompts = [(1, 2), (3, 4), (1, 2), (3, 4), (1, 2, 3), (1, 2)]
    slots.admit(range(6), [replace(_requests(WARM)[0], prompt_ids=prompt) for prompt in prompts])
    rows = torch.tensor([5, 1, 2, 3, 4])
    assert slots.equal_canvases(rows).tolist() == [5, 1, 5, 1, 4]
    slots._multipliers_W.zero_()
    assert slots.equal_canvases(rows).tolist() == [5, 1, 5, 3, 4], "rows that equal another than the first stay alone"


def test_requests_with_different_parameters_share_no_forward(policy: Transformer) -> None:
    base = _requests(WARM)[1]
    rows = [{}, {"forbidden_ids": (3, 4)}, {"cfg_scale": 1.5}, {"gen_length": 8}, {"block_length": 4}]
    requests = [replace(base, params=SamplingParams(**{**BASE, "temperature": 0.7, **changes})) for changes in rows]
    sampler = Sampler(policy, 0)
    for request, completion in zip(requests, sampler.generate(requests), strict=True):
        _check_equal(completion, sample(policy, request))


def test_different_seeds_differ_and_equal_seeds_agree(policy: Transformer) -> None:
    params = WARM.model_copy(update={"temperature": 2.0})
    group = [replace(_requests(params)[0], seed=seed) for seed in (1, 2, 3, 1)]
    texts = [completion.token_ids.tolist() for completion in Sampler(policy, 0).generate(group)]
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("changes", SCHEDULES.values(), ids=SCHEDULES)
def test_replaying_tokens_and_step_map_gives_the_recorded_logps(
    policy: Transformer, changes: dict[str, object]
) -> None:
    params = SamplingParams(**{**BASE, "temperature": 0.7, **changes})
    requests = [replace(request, fixed_tokens={3: 5}) for request in _requests(params)]
    for request, completion in zip(requests, Sampler(policy, 0).generate(requests), strict=True):
        replayed = replay(policy, request, completion)
        assert completion.exact
        np.testing.assert_allclose(replayed.logp, completion.commit_logp, atol=1e-5)
        np.testing.assert_allclose(replayed.logp_raw, completion.commit_logp_raw, atol=1e-5)
        np.testing.assert_allclose(replayed.entropy, completion.commit_entropy, atol=1e-5)
        np.testing.assert_allclose(replayed.distribution_entropy, completion.commit_law_entropy, atol=1e-5)


def test_the_recorded_logp_is_unbiased(policy: Transformer) -> None:
    """Select, then sample: E[logp + entropy] is 0. Sampling first and keeping the probable tokens is biased upwards."""
    prompt = _requests(WARM)[1]
    params = WARM.model_copy(update={"num_denoise_steps": 16})
    completions = Sampler(policy, 0).generate([replace(prompt, seed=seed, params=params) for seed in range(600)])
    excess = np.concatenate([c.commit_logp + c.commit_entropy for c in completions])
    assert abs(excess.mean()) < 4 * excess.std() / math.sqrt(len(excess))


def test_the_mask_id_is_never_emitted(policy: Transformer) -> None:
    with torch.no_grad():
        policy.head.weight[policy.config.mask_token_id] = 10 * policy.head.weight.abs().amax()
    completions = Sampler(policy, 0).generate(_requests(PARAMS) + _requests(PARAMS))
    assert all((completion.token_ids != policy.config.mask_token_id).all() for completion in completions)


def test_a_row_ends_with_the_block_of_its_first_eos(policy: Transformer) -> None:
    params = SamplingParams(gen_length=32, block_length=4, num_denoise_steps=16, temperature=3.0)
    completions = Sampler(policy, 0).generate([replace(_requests(params)[2], seed=seed) for seed in range(40)])
    eos_id = policy.config.eos_token_id
    ended = [completion for completion in completions if completion.finish_reason is FinishReason.EOS]
    assert 0 < len(ended) < 40
    for completion in completions:
        text = completion.token_ids[: completion.num_tokens]
        assert (text[:-1] != eos_id).all()
        if completion.finish_reason is FinishReason.EOS:
            assert text[-1] == eos_id
            assert len(completion.token_ids) == -(-completion.num_tokens // 4) * 4
        else:
            assert completion.num_tokens == 32
        assert completion.num_forwards == len(completion.token_ids) // 4 * 2


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("drawing", ["select_then_sample", "sample_then_select"])
def test_tokens_equal_the_original_d1_samplers(shared: Path, family: str, drawing: str) -> None:
    directory = shared / "fixtures" / f"{family}-tiny"
    sampler = Sampler(load_policy(directory), 0)
    for case in json.loads((directory / "expected_generations.json").read_text()):
        params = SamplingParams(
            gen_length=case["gen_length"],
            block_length=case["block_length"],
            num_denoise_steps=case["steps"],
            temperature=0,
            drawing=drawing,
            # d1's sampler does not stop at an end of text.
            stop_ids=(),
        )
        requests = [Request(prompt_ids=tuple(prompt), params=params, seed=0) for prompt in case["prompt"]]
        completions = sampler.generate(requests)
        assert [completion.token_ids.tolist() for completion in completions] == case["output"]
        assert all(completion.logp_exact for completion in completions)


def test_the_head_runs_only_on_masked_slots_of_the_block(policy: Transformer) -> None:
    """The memory of a step then grows with the number of these slots, not with batch size times length times
    vocabulary."""
    scored: list[int] = []
    # Every output of the last norm goes through the head.
    policy.norm.register_forward_hook(lambda norm, inputs, output: scored.append(len(output)))
    requests = [replace(request, params=WARM.model_copy(update={"stop_ids": ()})) for request in _requests(WARM)]
    Sampler(policy, 0).generate(requests)
    # Six rows, two blocks of 8 slots in 4 steps each: 8 + 6 + 4 + 2 masked slots.
    assert sum(scored) == 6 * 2 * (8 + 6 + 4 + 2)


def test_a_group_may_forbid_different_ids(policy: Transformer) -> None:
    """Equal prompts share a forward only where their forbidden ids are equal too."""
    prompt = _requests(PARAMS)[1]
    (free,) = Sampler(policy, 0).generate([prompt])
    params = PARAMS.model_copy(update={"forbidden_ids": tuple(set(free.token_ids.tolist()))})
    both = Sampler(policy, 0).generate([prompt, replace(prompt, params=params), prompt])
    assert both[0].token_ids.tolist() == both[2].token_ids.tolist() == free.token_ids.tolist()
    assert not set(both[1].token_ids.tolist()) & set(free.token_ids.tolist())


def test_fixed_tokens_stay_and_are_attended_to(policy: Transformer) -> None:
    """Infilling: a whole block, an end of text, and a canvas without any slot to fill."""
    params, eos_id = PARAMS, policy.config.eos_token_id
    (prompt, *_) = _requests(params)
    for fixed in (dict.fromkeys(range(8), 5), {3: 7, 12: eos_id}, {slot: slot + 1 for slot in range(16)}):
        request = replace(prompt, fixed_tokens=fixed)
        (completion,) = Sampler(policy, 0).generate([request])
        _check_equal(completion, sample(policy, request))
        for slot, token in fixed.items():
            if slot < len(completion.token_ids):
                assert completion.token_ids[slot] == token
                assert completion.step_map[slot] == -1
    assert completion.num_forwards == 0


def test_requests_can_join_a_running_batch(policy: Transformer) -> None:
    requests = _requests(WARM)
    batch = Sampler(policy, 0, EngineConfig(num_slots=4)).open(requests[:3])
    assert batch.step() == []
    masked = batch.state.canvases.masked.sum(dim=1).tolist()
    assert masked[:3] == [14, 14, 14], "two of sixteen slots are committed by a step"
    done = dict(batch.step())
    for request in requests[3:]:
        batch.submit(request)
    while len(done) < len(requests):
        done |= dict(batch.step())
    assert batch.num_running == 0
    for index, request in enumerate(requests):
        _check_equal(done[index], sample(policy, request))


def test_bfloat16_log_probs_equal_a_bfloat16_replay(policy: Transformer) -> None:
    """Logits differ in their last bits, but the record must match a replay in bfloat16."""
    half = copy.deepcopy(policy).to(torch.bfloat16)
    requests = _requests(WARM)
    for request, completion in zip(requests, Sampler(half, 0).generate(requests), strict=True):
        assert completion.commit_logp.dtype == np.float32
        np.testing.assert_allclose(replay(half, request, completion).logp, completion.commit_logp, atol=0.1)


@pytest.mark.nightly  # compiling takes half a minute
# torch.compile warns about its own code.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_policy_samples_the_same(policy: Transformer) -> None:
    engine = EngineConfig(num_slots=6, compile=True, static_shapes=True)
    requests = _requests(PARAMS.model_copy(update={"block_length": 16, "stop_ids": ()}))
    for request, completion in zip(requests, Sampler(policy, 0, engine).generate(requests), strict=True):
        _check_equal(completion, sample(policy, request), atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_policy_has_one_graph_and_is_not_recompiled(
    config: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in torch.compile's backend: a graph break adds a graph for each block, a new version would
    recompile all."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_(model, backend=count, fullgraph=True))
    policy = Transformer(config)
    init_weights(policy, seed=0)
    engine = EngineConfig(num_slots=4, compile=True, static_shapes=True)
    requests = _requests(PARAMS.model_copy(update={"block_length": 16, "stop_ids": ()}))
    first = Sampler(policy, 0, engine).generate(requests)
    num_graphs = len(graphs)
    assert 1 <= num_graphs <= 3, "one for each kind of shape, whatever the number of blocks"
    init_weights(policy, seed=1)
    second = Sampler(policy, 1, engine).generate(requests)
    assert len(graphs) == num_graphs
    same = [(one.token_ids == other.token_ids).all() for one, other in zip(first, second, strict=True)]
    assert not all(same), "the weights are others"


def test_the_block_window_may_extend_past_the_longest_row(policy: Transformer) -> None:
    """All rows view their block through a window of the longest block length, wherever that block is."""
    sizes = [(40, 24, 1), (1, 2, 2), (1, 32, 32)]
    requests = [
        Request(
            prompt_ids=(3,) * prompt_length,
            params=SamplingParams(
                gen_length=length, block_length=block, num_denoise_steps=length // block, temperature=0.0, stop_ids=()
            ),
            seed=0,
        )
        for prompt_length, length, block in sizes
    ]
    completions = Sampler(policy, 0, EngineConfig(num_slots=2)).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        _check_equal(completion, sample(policy, request))


def test_adjacent_seeds_have_different_draws(policy: Transformer) -> None:
    """Seeds, steps and slots are small integers, which collide under a weak hash."""
    (request, *_) = _requests(WARM)
    keys = torch.tensor([replace(request, seed=seed).draw_keys[0] for seed in range(64)])
    steps = torch.arange(64)
    draws = uniform(keys[:, None, None], steps[None, :, None], steps[None, None, :16])
    assert len(draws.unique()) > 0.99 * draws.numel()


def test_non_finite_weights_raise(policy: Transformer) -> None:
    with torch.no_grad():
        policy.norm.weight[3] = torch.nan
    for params in (PARAMS, WARM):
        with pytest.raises(FloatingPointError, match="not finite for request 0: bad weights"):
            Sampler(policy, 0).generate(_requests(params))


def test_an_invalid_request_does_not_enter_a_batch(policy: Transformer) -> None:
    batch = Sampler(policy, 0).open()
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        batch.submit(Request(prompt_ids=(), params=WARM, seed=0))
    for request in _requests(WARM):
        batch.submit(request)
    batch.step()
    assert batch.num_running == 6, "opened by hand, it has all its slots"


# Uncompiled FlexAttention warns that it is slow.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", [{}, {"cache": "dual"}, {"cache": "prefix"}, {"cfg_scale": 0.5}])
def test_flex_attention_samples_the_same(policy: Transformer, changes: dict[str, object]) -> None:
    requests = _requests(SamplingParams(**BASE | changes))
    masked = Sampler(policy, 0).generate(requests)
    skipped = Sampler(policy, 0, EngineConfig(attention="flex", static_shapes=True)).generate(requests)
    for one, other in zip(masked, skipped, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.commit_logp, other.commit_logp, atol=1e-5)
