"""Parsing of `d1 lm-eval --model_args`, without the harness."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.errors import UserError
from deploy.offline.evaluation.harness_arguments import HarnessArguments


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lenght": 128}, "lenght is no key of a d1 model; did you mean gen_length?"),
        (
            {"pretrained": "x"},
            "pretrained is no key of a d1 model, which has block_length, cache, cache_refresh_steps, ",
        ),
        ({"dtype": "half"}, "dtype is 'half'; it should be 'float32' or 'bfloat16'"),
        ({"slots": 0}, "slots is 0; it should be greater than 0"),
        ({"draws": "many"}, "draws is 'many'; it should be a whole number"),
        ({"threshold": 2}, "threshold is 2; it should be at most 1"),
        ({"threshold": float("nan")}, "threshold is nan; it should be a finite number"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        HarnessArguments.of({"checkpoint": "tiny", **given})
    assert str(refused.value).startswith(f"--model_args: {sentence}")


def test_arguments_that_the_harness_adds_are_ignored() -> None:
    own = {"batch_size": 1, "max_batch_size": 64, "trust_remote_code": True, "device": "cuda:0"}
    arguments = HarnessArguments.of({"checkpoint": 7, "gen_length": 64, **own})
    assert (arguments.checkpoint, arguments.sampling) == ("7", {"gen_length": 64})
