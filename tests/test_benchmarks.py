"""What the benchmarks compare with is what it says it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import roofline, toy
from benchmarks.reference import ReferenceNet, Work, generate, generate_lockstep
from learner.model.checkpoint import load_policy
from learner.model.transformer import Transformer
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler


def test_the_reference_is_the_original_d1_sampler(shared: Path) -> None:
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


def test_the_references_network_is_ours(policy: Transformer) -> None:
    full = policy.config.model_copy(update={"num_kv_heads": policy.config.num_heads})
    model = Transformer(full)
    ids = torch.randint(0, 38, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ReferenceNet(model)(ids), model(ids), atol=1e-5, rtol=0)


def test_lockstep_batches_commit_what_slots_do(policy: Transformer) -> None:
    params = SamplingParams(gen_length=16, block_length=8, temperature=0, threshold=0.3, stop_ids=())
    prompts = torch.randint(0, 38, (4, 6), generator=torch.Generator().manual_seed(1))
    requests = [Request(prompt_ids=tuple(prompt), params=params, seed=0) for prompt in prompts.tolist()]
    slots = [completion.token_ids.tolist() for completion in Sampler(policy, 0).generate(requests)]
    assert generate_lockstep(policy, prompts, params).tolist() == slots


def test_the_toys_answers_follow_from_its_prompts() -> None:
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
    """One forward of 512 tokens is 7.81 TFLOP, 9.9 ms at 790 TFLOP/s; two tokens for each."""
    assert roofline.limit(masked_head=False, restricted=False) == pytest.approx(2 / 9.9e-3, rel=0.01)
