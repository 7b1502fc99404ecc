"""Structured outputs: for any predictions in any order of commits, the text matches its schema."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from deploy.requests.structured.grammars import Grammars
from deploy.requests.structured.structure import Structure
from learner.model.config import TransformerConfig
from learner.model.tokenizer import ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.deploy.structured.random_schemas import random_schema

TEXTS = ['hello world {"name": "x", "age": 12} [true, false, null] the quick brown fox']
SCHEDULES = [
    {"num_denoise_steps": 96},
    {"num_denoise_steps": 12},
    {"threshold": 0.1},
    {"schedule": "random", "num_denoise_steps": 48},
    {"schedule": "left_to_right", "num_denoise_steps": 48},
    {"entropy_bound": 4.0},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = Path(tmp_path_factory.mktemp("tokenizer"))
    make_tokenizer(TEXTS * 5, directory, 400)
    return ChatTokenizer(directory)


@pytest.fixture(scope="module")
def sampler(tokenizer: ChatTokenizer) -> Sampler:
    config = TransformerConfig(
        # More ids than tokens, as in published checkpoints.
        vocab_size=len(tokenizer) + 3,
        d_model=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        mlp_hidden_size=16,
        max_sequence_length=256,
        mask_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    policy = Transformer(config)
    init_weights(policy, seed=0)
    return Sampler(policy, 0)


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_texts_of_random_schemas_are_valid(num: int, tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    grammars = Grammars(tokenizer, sampler.model.config.vocab_size)
    num_sampled = 0
    for seed in range(num):
        draw = random.Random(seed)
        schema = random_schema(draw)
        grammar = grammars.of(Structure.of_schema(schema, "response_format"))
        if (grammar.fewest_tokens or 0) > 96:
            continue
        params = SamplingParams(
            gen_length=96, block_length=32, temperature=draw.choice([0.0, 1.0]), **SCHEDULES[seed % len(SCHEDULES)]
        )
        request = Request(prompt_ids=(5, 6), params=params, seed=seed, grammar=grammar)
        completion = sampler.generate([request])[0]
        text = tokenizer.decode(completion.token_ids[: completion.num_tokens].tolist())
        jsonschema.validate(json.loads(text), schema)
        num_sampled += 1
    assert num_sampled > 0.9 * num
