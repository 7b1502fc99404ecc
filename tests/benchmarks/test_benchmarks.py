"""Tests of the benchmarks' baselines: reference update, roofline and FLOP counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import blocks, learner_curves, roofline, toy, update_flops
from benchmarks import learner as learner_benchmark
from benchmarks.models import Shape
from benchmarks.reference import ReferenceNet, Work, generate, generate_lockstep
from benchmarks.rounds import Setting, make_reference, make_round, prompt_masks
from benchmarks.weights import loading
from learner.model.checkpoint import load_policy
from learner.model.transformer import Transformer
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler


def test_the_reference_sampler_equals_the_original_d1_sampler(shared: Path) -> None:
    directory = shared / "fixtures" / "llada-tiny"
    net = ReferenceNet(load_policy(directory))
    for case in json.loads((directory / "expected_generations.json").read_text()):
        params = SamplingParams(
            gen_length=case["gen_length"],
            block_length=case["block_length"],
            num_denoise_steps=case["steps"],
            temperature=0,
        )
        work = Work()
        assert generate(net, torch.tensor(case["prompt"]), params, work).tolist() == case["output"]
        assert work.num_forwards == case["steps"]


def test_the_reference_network_equals_ours(policy: Transformer) -> None:
    full = policy.config.model_copy(update={"num_kv_heads": policy.config.num_heads})
    model = Transformer(full)
    ids = torch.randint(0, 38, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ReferenceNet(model)(ids), model(ids), atol=1e-5, rtol=0)


def test_lockstep_batches_equal_continuous_batching(policy: Transformer) -> None:
    params = SamplingParams(gen_length=16, block_length=8, temperature=0, threshold=0.3, stop_ids=())
    prompts = torch.randint(0, 38, (4, 6), generator=torch.Generator().manual_seed(1))
    requests = [Request(prompt_ids=tuple(prompt), params=params, seed=0) for prompt in prompts.tolist()]
    slots = [completion.token_ids.tolist() for completion in Sampler(policy, 0).generate(requests)]
    assert generate_lockstep(policy, prompts, params).tolist() == slots


def test_toy_answers_follow_from_their_prompts() -> None:
    prompts, answers, lengths = toy.problems(50, seed=3)
    canvas = torch.cat((prompts, answers), dim=1)
    for row, length in zip(canvas.tolist(), lengths.tolist(), strict=True):
        for column in range(toy.PERIOD, toy.PERIOD + length):
            before, left = row[column - toy.PERIOD], row[column - 1]
            if before < toy.BASE:
                assert row[column] == (before + 1 + (before % 4 == 0 and left % 2 == 1)) % toy.BASE
        assert set(row[toy.PERIOD + length :]) <= {toy.EOS}
    assert toy.accuracy(answers.tolist(), answers, lengths) == 1.0
    assert len(set(lengths.tolist())) > 20


def test_the_roofline_is_that_of_llada_8b() -> None:
    """One forward of 512 tokens is 7.81 TFLOP, or 9.9 ms at 790 TFLOP/s, and commits two tokens."""
    assert roofline.limit(masked_head=False, restricted=False) == pytest.approx(2 / 9.9e-3, rel=0.01)


TINY = Setting(
    shape=Shape(d_model=16, num_layers=2, num_heads=2, vocab_size=40),
    prompt_tokens=5,
    gen_length=32,
    num_groups=2,
    group_size=3,
    num_updates=3,
)


@pytest.mark.parametrize("p_mask_prompt", [0.15, 0.0])
def test_our_update_equals_the_original_d1s(p_mask_prompt: float) -> None:
    """Both use d1's normalisation and our prompt masks, over several inner updates with a KL penalty."""
    row = learner_benchmark.same(replace(TINY, p_mask_prompt=p_mask_prompt))
    assert row["updates"] == 3
    assert row["first_gradient"] < 1e-5
    assert row["last_gradient"] < 1e-4
    assert row["weights"] < 1e-2


def test_a_stacked_forward_gives_the_same_update_as_one_per_mask() -> None:
    batch = make_round(TINY)
    apart, stacked = make_reference(TINY), make_reference(TINY, is_stacked=True)
    for reference in (apart, stacked):
        reference.update(batch, prompt_masks(TINY, batch))
    for one, other in zip(apart.model.parameters(), stacked.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_every_part_of_the_learners_benchmark_runs(tmp_path: Path) -> None:
    assert learner_benchmark.speed(TINY, "tiny", 1)["ratio"].median > 0
    assert learner_benchmark.utilisation(TINY, torch.bfloat16, 16)["flop_per_s"] > 0
    peak = {"peak_bytes_reference": 2, "peak_bytes_d1_p0.15": 1, "peak_bytes_d1_p0": 1}
    swept = [
        {"axis": axis, "value": value, **peak}
        | {f"arithmetic_p{p}": 2.0 for p in ("0.15", "0")}
        | {f"ratio_p{p}": learner_benchmark.Ratio(2.0, 1.0, 3.0) for p in ("0.15", "0")}
        for axis in ("vocab_size", "gen_length")
        for value in (1, 10)
    ]
    learner_curves.draw({"curves": swept}, tmp_path / "learner.png")
    assert (tmp_path / "learner.png").is_file()


def test_methods_run_as_many_canvases_as_in_their_papers() -> None:
    # Short prompts share masks, and so canvases. In a group of three the draws of a completion are split.
    setting = replace(TINY, prompt_tokens=40, num_groups=1, group_size=6)
    rows = {row["method"]: row for row in learner_benchmark.methods(setting, 1)}
    for name, draws in {"diffu-grpo": 1, "espo": 4}.items():
        updates = rows[name]["updates"]
        assert rows[name]["backwards"] == pytest.approx(draws * updates, rel=0.1)
        # The old likelihoods of the first update need no extra forward.
        assert rows[name]["forwards"] == pytest.approx(draws * (3 * updates - 1), rel=0.1)
    assert rows["stepmerge"]["backwards"] > 3 * rows["diffu-grpo"]["backwards"]


def test_update_flops_are_counted_from_the_matrix_products() -> None:
    """LLaDA-8B: a forward of 512 slots is 7.81 TFLOP. Old, reference, new and backward are five of these."""
    config = learner_benchmark.LLADA_8B.config(512)
    counts = update_flops.Counts(num_canvases=1, canvas_tokens=512, asked_tokens=512, text_tokens=512, num_updates=1)
    assert sum(update_flops.forward(config, counts, spares_head=False, spares_block=False)) == pytest.approx(
        7.81e12, rel=0.01
    )
    flops = list(update_flops.round_flops(config, counts).values())
    assert flops[0] == pytest.approx(5 * 7.81e12, rel=0.01)
    assert flops[2] == flops[0]
    assert flops[3] == pytest.approx(4 / 5 * flops[0])


@pytest.mark.nightly
def test_a_rank_starts_in_little_more_memory_than_its_shard() -> None:
    """The excess is at most one tensor's rows. The largest is the embedding, 34 MB on each of two ranks."""
    (row,) = loading.rows(0.3, 2, ["by rows"])
    assert row.shard_bytes > 150e6
    assert row.peak_bytes < 1.05 * row.shard_bytes + 2 * 34e6


def test_both_ways_of_sampling_block_causal_policies_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings depend on the machine. The compared values must be equal, and replay must run fewer slots."""
    monkeypatch.setattr(blocks, "SHAPE", Shape(d_model=32, num_layers=2, num_heads=2, vocab_size=64))
    full, whole, plain, remembered = blocks.sampling(32, 2, 1)
    assert remembered["tokens_equal"]
    assert remembered["largest_difference"] < 1e-4
    assert remembered["times"] == 1.0
    assert min(full["seconds"], whole["seconds"], plain["seconds"]) > 0
    model, prompts = blocks.policies(32)["block-causal"], 1 + torch.arange(2 * 64).view(2, 64) % 59
    params = SamplingParams(gen_length=32, block_length=4, steps_per_block=2, stop_ids=(), temperature=0.0)
    ours = Sampler(model, 0).generate(
        [Request(prompt_ids=tuple(ids), params=params, seed=0) for ids in prompts.tolist()]
    )
    assert [row.token_ids.tolist() for row in ours] == blocks.full_forwards(model, prompts, 32).tolist()
    by_step, by_row = blocks.replay(32, 2, 1, steps_per_block=2)
    assert by_row["largest_difference"] < 1e-4
    # By step: sixteen steps of 96 columns. By row: 92 clean columns, and two states of eight blocks.
    assert (by_step["slots"], by_row["slots"]) == (2 * 16 * 96, 2 * (92 + 2 * 8 * 4))
