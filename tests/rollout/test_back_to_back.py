"""Canvases packed without padding, as on a GPU in half precision: same output as padded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout import sampler as module
from rollout.config import EngineConfig
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler


def _policy(config: TransformerConfig, family: str) -> Transformer:
    model = make_model(config.model_copy(update={"family": family, "predicts_next": family == "dream"}))
    init_weights(model, seed=0)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.mul_(4.0)
    return model


def _requests(changes: dict[str, Any]) -> list[Request]:
    """Return prompts of one to five tokens, canvases of eight and sixteen slots, blocks of four and eight."""
    base: dict[str, Any] = {"num_denoise_steps": 4, "stop_ids": ()} | changes
    shapes = ((8, 4), (16, 8), (8, 8), (16, 4), (8, 4), (8, 4))
    return [
        Request(
            prompt_ids=tuple(range(1, 2 + row % 5)),
            params=SamplingParams(**base, gen_length=length, block_length=block),
            seed=row,
        )
        for row, (length, block) in enumerate(shapes)
    ]


def _generated(model: Transformer, requests: list[Request], engine: EngineConfig) -> tuple[list[Completion], int]:
    sampler = Sampler(model, 0, engine)
    return sampler.generate(requests), sampler.counts.num_tokens


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.7, "top_k": 9}, {"cfg_scale": 1.0}, {"threshold": 0.3}],
)
def test_packed_rows_sample_the_same_as_padded_ones(
    config: TransformerConfig,
    family: str,
    changes: dict[str, Any],
    static_shapes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, requests = _policy(config, family), _requests(changes)
    engine = EngineConfig(num_slots=4, static_shapes=static_shapes)
    padded, num_padded = _generated(model, requests, engine)
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    found, num_found = _generated(model, requests, engine)
    assert [row.token_ids.tolist() for row in found] == [row.token_ids.tolist() for row in padded]
    assert [row.step_map.tolist() for row in found] == [row.step_map.tolist() for row in padded]
    for one, other in zip(found, padded, strict=True):
        assert one.commit_logp == pytest.approx(other.commit_logp, abs=1e-5)
    assert num_found < num_padded, "it runs no padding"


@pytest.mark.parametrize("changes", [{"compile": True}, {"attention": "flex"}])
def test_rows_are_padded_under_compilation(
    config: TransformerConfig, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows have few distinct widths, which avoids recompilation."""
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    model = _policy(config, "llada")
    assert module._concatenates_rows(model, EngineConfig())
    assert not module._concatenates_rows(model, EngineConfig(**changes))


def test_rows_are_padded_with_a_kv_cache(config: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache has one fixed place for each column."""
    model, requests = _policy(config, "llada"), _requests({"temperature": 0.0, "cache": "prefix"})
    engine = EngineConfig(num_slots=4)
    padded = _generated(model, requests, engine)
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    found = _generated(model, requests, engine)
    assert found[1] == padded[1]
    assert [row.token_ids.tolist() for row in found[0]] == [row.token_ids.tolist() for row in padded[0]]
