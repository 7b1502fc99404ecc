"""`d1 sample` and `d1 export` of published checkpoints, whose mask id is only in the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from learner.model.checkpoint import load_policy
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.published.tiny_published import FAMILIES, publish


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_checkpoint_is_sampled_and_exported_as_it_is(family: str, d1: Callable, workdir: Path) -> None:
    shape = publish(workdir, family)
    policy = load_policy(workdir / "model")
    assert policy.config == shape
    asked = {"gen_length": 8, "block_length": 4, "steps_per_block": 2, "temperature": 1.0}
    (workdir / "r").write_text(json.dumps({"prompt_ids": [5, 6, 7], "seed": 3} | asked))
    ended = d1("sample", "model", "--requests", "r", "--json")
    assert ended.status == 0
    (answer,) = [json.loads(line) for line in ended.out.splitlines()]
    request = Request(prompt_ids=(5, 6, 7), params=SamplingParams.model_validate(asked), seed=3)
    (expected,) = Sampler(policy, 0).generate([request])
    assert answer["token_ids"] == expected.token_ids[: expected.num_tokens].tolist()
    assert d1("export", "model", "out").status == 0
    assert load_policy(workdir / "out").config == shape
    before, after = (load_file(workdir / name / "model.safetensors") for name in ("model", "out"))
    assert {name: tensor.numpy().tobytes() for name, tensor in before.items()} == {
        name: tensor.numpy().tobytes() for name, tensor in after.items()
    }
