"""Completions of a rollout tree: what they share, on every engine, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler
from tests.rollout.slow import sample

BASE: dict[str, Any] = {"gen_length": 12, "block_length": 4, "num_denoise_steps": 6, "temperature": 1.0, "stop_ids": ()}
SAMPLED = {
    "by steps": BASE,
    "at random": BASE | {"schedule": "random"},
    "samples first": BASE | {"drawing": "sample_then_select"},
    "steps of a block": BASE | {"num_denoise_steps": 128, "steps_per_block": 2},
}
ENGINES = {
    "default": EngineConfig(),
    "few slots": EngineConfig(num_slots=3),
    "static, three steps a check": EngineConfig(num_slots=5, static_shapes=True, steps_per_sync=3),
}


@pytest.fixture(scope="module")
def bidirectional(config: TransformerConfig) -> Transformer:
    model = make_model(config)
    init_weights(model, seed=0)
    return model


def _tree(params: SamplingParams, num_levels: int) -> list[Request]:
    """Return the leaves of a binary tree."""
    return [
        Request(
            prompt_ids=(3, 5, 8),
            params=params,
            seed=100 + leaf,
            node_seeds=tuple(1000 * level + (leaf >> (num_levels - level)) for level in range(1, num_levels)),
        )
        for leaf in range(2**num_levels)
    ]


def _shown(completion: Completion, num_steps: int) -> list[int]:
    return np.where(completion.step_map < num_steps, completion.token_ids, -1).tolist()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("num_levels", [2, 3])
def test_leaves_share_their_canvases_up_to_where_they_part(
    bidirectional: Transformer, sampling: dict[str, Any], engine: EngineConfig, num_levels: int
) -> None:
    requests = _tree(SamplingParams.model_validate(sampling), num_levels)
    # One without a tree among them, and one with other levels.
    others = [replace(requests[0], node_seeds=()), replace(requests[0], node_seeds=(7,))]
    completions = Sampler(bidirectional, 0, engine).generate([*others, *requests])[2:]
    for level in range(1, num_levels + 1):
        canvases = [tuple(_shown(completion, 6 // num_levels * level)) for completion in completions]
        of_node = [
            canvases[first : first + 2 ** (num_levels - level)]
            for first in range(0, 2**num_levels, 2 ** (num_levels - level))
        ]
        assert [len(set(some)) for some in of_node] == [1] * 2**level
        assert len(set(canvases)) > 2 ** (level - 1), "siblings part"


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
def test_each_level_draws_by_its_own_seed(bidirectional: Transformer, sampling: dict[str, Any]) -> None:
    requests = _tree(SamplingParams.model_validate(sampling), 3)
    for request, completion in zip(requests, Sampler(bidirectional, 0).generate(requests), strict=True):
        slow = sample(bidirectional, request)
        assert (completion.token_ids.tolist(), completion.step_map.tolist()) == (slow.tokens, slow.step_map)


def test_levels_of_one_seed_are_a_completion_without_levels(bidirectional: Transformer) -> None:
    plain = Request(prompt_ids=(3, 5, 8), params=SamplingParams.model_validate(BASE), seed=4)
    first, second = Sampler(bidirectional, 0).generate([plain, replace(plain, node_seeds=(4, 4))])
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_leaves_in_step_share_their_forwards(bidirectional: Transformer) -> None:
    """Two levels of three steps: the root's step, then two nodes for two steps more, then four leaves after the first
    step of the second level."""
    sampler = Sampler(bidirectional, 0)
    sampler.generate(_tree(SamplingParams.model_validate(BASE), 2))
    assert sampler.counts.num_rows == 1 + 2 * 2 + 2 + 4 * 2


@pytest.mark.parametrize(
    ("changes", "num_levels", "why"),
    [
        ({"threshold": 0.5}, 2, "a schedule whose number of steps is given"),
        ({}, 4, "3 node_seeds make 4 levels, which must divide the 6 denoise steps"),
    ],
)
def test_levels_need_steps_that_they_divide(
    bidirectional: Transformer, changes: dict[str, Any], num_levels: int, why: str
) -> None:
    requests = _tree(SamplingParams.model_validate(BASE | changes), num_levels)
    with pytest.raises(ValueError, match=why):
        Sampler(bidirectional, 0).generate(requests)


def test_levels_need_a_bidirectional_policy(config: TransformerConfig) -> None:
    causal = make_model(config.model_copy(update={"family": "sdar", "block_length": 4}))
    init_weights(causal, seed=0)
    with pytest.raises(ValueError, match="needs a bidirectional policy"):
        Sampler(causal, 0).generate(_tree(SamplingParams.model_validate(BASE), 2))


def test_a_wider_tree_keeps_the_keys_of_rows_that_are_running(bidirectional: Transformer) -> None:
    """A row without a tree keeps its key for more steps than `num_denoise_steps`, as a threshold may take."""
    params = SamplingParams.model_validate(BASE)
    slow = SamplingParams.model_validate(BASE | {"num_denoise_steps": 3, "threshold": 0.99})
    requests = [*_tree(slow, 1), *_tree(params, 3)[:2]]
    alone = [Sampler(bidirectional, 0).generate([request])[0] for request in requests]
    batch = Sampler(bidirectional, 0).open(requests[:2])
    batch.step()
    for request in requests[2:]:
        batch.submit(request)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= dict(batch.step())
    assert max(alone[0].step_map) >= 6
    for index, completion in enumerate(alone):
        torch.testing.assert_close(torch.tensor(found[index].token_ids), torch.tensor(completion.token_ids))
