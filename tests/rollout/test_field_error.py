"""Error messages that name a field as the user's configuration spells it."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from rollout.field_error import FieldError
from rollout.request import SamplingParams


def test_only_field_names_are_substituted() -> None:
    error = FieldError("{schedule} threshold needs {threshold}, not {given}", given="{schedule} threshold")
    assert str(error) == "schedule threshold needs threshold, not {schedule} threshold"
    assert error.named({"threshold": "--threshold"}) == (
        "schedule threshold needs --threshold, not {schedule} threshold"
    )
    assert error.fields == ["schedule", "threshold"]


def test_a_samplers_error_names_its_fields() -> None:
    with pytest.raises(ValidationError) as refused:
        SamplingParams(gen_length=20, block_length=8)
    error = refused.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, FieldError)
    names = {"gen_length": "--gen-length", "block_length": "--block-length"}
    assert error.named(names) == "--block-length 8 does not divide --gen-length 20; take a divisor of 20"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
