"""Columnar serialization of completions between processes."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest

from actors.columnar import Completions
from learner.model.transformer import Transformer
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler


@pytest.fixture
def completions(policy: Transformer) -> Completions:
    """Five completions of one to three blocks."""
    params = SamplingParams(gen_length=12, block_length=4, num_denoise_steps=12, temperature=1.0, stop_ids=())
    sampled = Sampler(policy, 7).generate([Request(prompt_ids=(3, 4), params=params, seed=seed) for seed in range(5)])
    return Completions(_first_blocks(completion, 1 + index % 3) for index, completion in enumerate(sampled))


def _first_blocks(completion: Completion, count: int) -> Completion:
    arrays = {name: value for name in _NAMES if isinstance(value := getattr(completion, name), np.ndarray)}
    return replace(completion, num_tokens=4 * count, **{name: array[: 4 * count] for name, array in arrays.items()})


_NAMES = [field.name for field in fields(Completion)]


def _sent(completions: Completions) -> tuple[Completions, int]:
    """Serialize and deserialize; return the result and the number of out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(completions, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=buffers), len(buffers)


def test_completions_round_trip(completions: Completions) -> None:
    arrived, _ = _sent(completions)
    assert type(arrived) is Completions
    assert [completion.num_tokens for completion in arrived] == [4, 8, 12, 4, 8]
    for one, other in zip(arrived, completions, strict=True):
        for name in _NAMES:
            ours, theirs = getattr(one, name), getattr(other, name)
            if isinstance(theirs, np.ndarray):
                assert ours.dtype == theirs.dtype
                assert ours.tolist() == theirs.tolist()
            else:
                assert (type(ours), ours) == (type(theirs), theirs)


def test_the_number_of_buffers_does_not_grow_with_completions(completions: Completions) -> None:
    _, num_buffers = _sent(completions)
    assert num_buffers == _sent(Completions(completions[:1]))[1] <= 8


def test_an_empty_list_round_trips() -> None:
    assert _sent(Completions())[0] == ()
