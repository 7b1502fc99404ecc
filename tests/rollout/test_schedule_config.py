"""Evaluation schedules, which replace the schedule of the sampling parameters."""

import pytest
from pydantic import ValidationError

from rollout.config import EvaluationConfig, RolloutConfig
from rollout.request import SamplingParams, Schedule
from rollout.schedule_config import ScheduleConfig

BASE = SamplingParams(gen_length=18, block_length=18, num_denoise_steps=9, temperature=0.7, top_k=5)


@pytest.mark.parametrize(
    ("sampling", "schedule", "expected", "name"),
    [
        ({}, {"num_denoise_steps": 3}, {"num_denoise_steps": 3}, "3 steps"),
        ({}, {"threshold": 0.9}, {"threshold": 0.9, "schedule": "threshold"}, "threshold 0.9"),
        ({"schedule": "random"}, {"num_denoise_steps": 1}, {"schedule": "random", "num_denoise_steps": 1}, None),
        ({"threshold": 0.5}, {"num_denoise_steps": 6}, {"threshold": None, "schedule": "quota"}, "6 steps"),
        ({"threshold": 0.5}, {"entropy_bound": 0.2}, {"threshold": None, "entropy_bound": 0.2}, "entropy bound 0.2"),
        ({}, {"factor": 1.5}, {"factor": 1.5, "schedule": "factor"}, "factor 1.5"),
        ({}, {"schedule": "left_to_right"}, {"schedule": "left_to_right"}, "left to right, 9 steps"),
        (
            {},
            {"schedule": "left_to_right", "threshold": 0.8},
            {"schedule": "left_to_right", "threshold": 0.8},
            "left to right, threshold 0.8",
        ),
    ],
)
def test_a_schedule_replaces_the_sampling_schedule(
    sampling: dict[str, object], schedule: dict[str, object], expected: dict[str, object], name: str | None
) -> None:
    params = ScheduleConfig(**schedule).of(SamplingParams(**{**BASE.model_dump(exclude={"schedule"}), **sampling}))
    assert {key: getattr(params, key) for key in expected} == expected
    assert (params.gen_length, params.temperature, params.top_k) == (18, 0.7, 5), "the rest stays"
    assert name is None or params.schedule_name == name


def test_steps_per_block_and_total_steps_replace_each_other() -> None:
    blocks = SamplingParams(gen_length=18, block_length=4, steps_per_block=2)
    assert blocks.schedule_name == "2 steps a block"
    assert ScheduleConfig(steps_per_block=4).of(blocks).schedule_name == "4 steps a block"
    assert ScheduleConfig(steps_per_block=1).of(blocks).schedule_name == "1 step a block"
    sure = ScheduleConfig(steps_per_block=4, threshold=0.9).of(blocks)
    assert (sure.schedule_name, sure.num_block_steps) == ("threshold 0.9, at most 4 steps a block", 4)
    assert ScheduleConfig(threshold=0.9).of(blocks).steps_per_block is None
    of_all = SamplingParams(gen_length=16, block_length=4, steps_per_block=2)
    assert ScheduleConfig(num_denoise_steps=16).of(of_all).num_block_steps == 4


def test_schedule_names_have_the_right_plural() -> None:
    assert BASE.model_copy(update={"num_denoise_steps": 1}).schedule_name == "1 step"
    random = BASE.model_copy(update={"schedule": Schedule.RANDOM})
    assert random.schedule_name == "random, 9 steps"


def test_the_default_schedule_is_that_of_the_sampling() -> None:
    assert RolloutConfig(sampling=BASE).params == (BASE,)
    assert EvaluationConfig().params(BASE) == (BASE,)


@pytest.mark.parametrize(
    ("schedules", "sentence"),
    [
        (
            [{"num_denoise_steps": 9}, {"num_denoise_steps": 19}],
            r"schedules\[1\]: num_denoise_steps 19 must be a multiple of the 1 blocks and at most gen_length 18",
        ),
        ([{"threshold": 1.2}], r"schedules\.0\.threshold\n  Input should be less than or equal to 1"),
        ([{"schedule": "factor"}], r"schedules\[0\]: schedule factor needs factor"),
        ([], "schedules is empty; name one"),
    ],
)
def test_an_incompatible_schedule_is_named(schedules: list[dict[str, object]], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        RolloutConfig.model_validate({"sampling": BASE, "schedules": schedules})
