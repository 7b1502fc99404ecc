"""Validation of requests: an invalid one is rejected with one sentence that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer
from rollout.request import Request, SamplingParams, Schedule
from rollout.request_checks import check_request
from rollout.sampler import Sampler

BASE: dict[str, Any] = {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8, "temperature": 1.0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_length": 7}, "block_length 7 does not divide gen_length 16; take a divisor of 16"),
        ({"num_denoise_steps": 1}, "num_denoise_steps 1 must be a multiple of the 2 blocks"),
        ({"num_denoise_steps": 3}, "num_denoise_steps 3 must be a multiple of the 2 blocks"),
        ({"num_denoise_steps": 32}, "at most gen_length 16"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e39}, "less than or equal to 1000"),
        ({"temperature": 1e-9}, "temperature 1e-09 is neither 0 nor at least 0.001"),
        ({"cfg_scale": 1e38}, "less than or equal to 1000"),
        ({"schedule": "threshold"}, "schedule threshold needs threshold"),
        ({"schedule": "quota", "factor": 1.0}, "schedule quota does not take factor; leave it out"),
        ({"threshold": 0.9, "factor": 1.0}, "schedule threshold does not take factor"),
        ({"cfg_scale": 1.0, "cache": "dual"}, "cfg_scale 1 needs cache none"),
        ({"cache_refresh_steps": 4}, "cache_refresh_steps 4 needs a cache"),
        ({"top_p": 0.0}, "greater than or equal to 0.000001"),
    ],
)
def test_invalid_parameters_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        SamplingParams(**BASE | changes)


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({}, Schedule.QUOTA),
        ({"threshold": 0.9}, Schedule.THRESHOLD),
        ({"factor": 1.0}, Schedule.FACTOR),
        ({"entropy_bound": 0.1}, Schedule.ENTROPY_BOUND),
        ({"schedule": "left_to_right", "threshold": 0.9}, Schedule.LEFT_TO_RIGHT),
        # Confidence-based schedules take as many steps as they need.
        ({"threshold": 0.9, "num_denoise_steps": 999}, Schedule.THRESHOLD),
    ],
)
def test_a_schedule_is_named_by_its_parameter(changes: dict[str, Any], schedule: Schedule) -> None:
    assert SamplingParams(**BASE | changes).schedule is schedule
    assert SamplingParams(**SamplingParams(**BASE | changes).model_dump(mode="json")).schedule is schedule


@pytest.mark.parametrize(
    ("changes", "params", "sentence"),
    [
        ({"prompt_ids": ()}, {}, "prompt_ids is empty"),
        ({"prompt_ids": (1, 40)}, {}, "prompt_ids has 40; the policy's token ids are 0 to 39"),
        ({"prompt_ids": (1, -1)}, {}, "prompt_ids has -1"),
        ({"prompt_ids": (1, 38)}, {}, "prompt_ids has the mask id 38"),
        (
            {"prompt_ids": (1,) * 49},
            {},
            "prompt_ids of 49 and gen_length 16 make 65 tokens; the policy takes at most 64",
        ),
        ({"seed": -1}, {}, "seed -1 is not between 0 and 2"),
        ({"seed": 2**63}, {}, "seed 9223372036854775808 is not between"),
        ({}, {"forbidden_ids": (40,)}, "forbidden_ids has 40"),
        ({}, {"forbidden_ids": tuple(range(40))}, "forbidden_ids forbids every token"),
        ({}, {"stop_ids": (99,)}, "stop_ids has 99"),
        ({"fixed_tokens": {16: 1}}, {}, "fixed_tokens has slot 16; the completion has slots 0 to 15"),
        ({"fixed_tokens": {0: 38}}, {}, "fixed_tokens gives the mask id 38 to slot 0"),
        ({"fixed_tokens": {0: 77}}, {}, "fixed_tokens has 77"),
    ],
)
def test_requests_that_the_policy_cannot_serve_are_refused(
    policy: Transformer, changes: dict[str, Any], params: dict[str, Any], sentence: str
) -> None:
    good = {"prompt_ids": (1, 2, 3), "seed": 0, "params": SamplingParams(**BASE)}
    bad = Request(**good | {"params": SamplingParams(**BASE | params)} | changes)
    with pytest.raises(ValueError, match=sentence):
        check_request(bad, policy.config)
    with pytest.raises(ValueError, match=f"request 1: {sentence}"):
        Sampler(policy, 0).generate([Request(**good), bad])


def test_a_request_of_the_maximum_length_is_accepted(config: TransformerConfig) -> None:
    """Does not raise."""
    check_request(Request(prompt_ids=(1,) * 48, seed=2**63 - 1, params=SamplingParams(**BASE)), config)
