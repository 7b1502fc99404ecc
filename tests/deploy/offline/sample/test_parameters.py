"""`d1 sample`: the sources of its parameters, and that each reaches the sampler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.errors import UserError
from deploy.offline.policy import open_policy
from deploy.requests.families import Defaults, overlay
from deploy.requests.parameters import SAMPLING_FIELDS, SETTINGS, Diffusion, to_params
from learner.model.tokenizer import ChatTokenizer
from rollout.config import EngineConfig
from rollout.request import SamplingParams, Schedule
from tests.deploy.offline.sample.asking import SHORT


def test_a_text_ends_at_its_stop_token_and_what_follows_in_the_block_is_its_tail(ask: Callable) -> None:
    request = {"prompt_ids": [5, 6], **SHORT}
    whole = ask([request | {"stop_ids": []}]).lines[0]
    assert whole["num_tokens"] == 16
    assert whole["finish_reason"] == "length"
    assert whole["tail"] == {"token_ids": [], "step_map": []}
    stop = whole["token_ids"][3]
    end = whole["token_ids"].index(stop) + 1
    (cut,) = ask([request | {"stop_ids": [stop]}]).lines
    assert cut["num_tokens"] == end
    assert cut["finish_reason"] == "eos"
    for name in ("token_ids", "step_map", "commit_logp_raw", "commit_entropy", "fallback", "commit_logp"):
        assert cut[name] == whole[name][:end]
    assert cut["tail"] == {"token_ids": whole["token_ids"][end:8], "step_map": whole["step_map"][end:8]}
    assert cut["num_forwards"] == 4


def test_no_stop_ids_fill_the_canvas_of_requests_without_their_own(ask: Callable, stop_soon: Callable) -> None:
    request = {"prompt_ids": [5, 6], **SHORT}
    whole = ask([request | {"stop_ids": []}]).lines[0]
    stop_soon(whole["token_ids"][3])
    assert ask([request]).lines[0]["num_tokens"] < 16
    assert ask([request], "stop_ids=[]").lines == [whole]
    other = whole["token_ids"][1]
    (own,) = ask([request | {"stop_ids": [other]}], "stop_ids=[]").lines
    assert own["num_tokens"] == whole["token_ids"].index(other) + 1


def test_conversations_go_through_the_chat_template_and_a_text_is_raw(
    ask: Callable, d1: Callable, checkpoints: Path
) -> None:
    tokenizer = ChatTokenizer(checkpoints / "with")
    by_template = tokenizer.encode_chat([{"role": "user", "content": "What is 2?"}])
    plain = tokenizer.encode_plain("What is 2?")
    asked = [
        {"prompt": "What is 2?"},
        {"messages": [{"role": "user", "content": "What is 2?"}]},
        {"prompt_ids": by_template},
        {"prompt_ids": plain},
    ]
    text, turn, of_turn, of_text = (ask([a | SHORT]).lines[0] for a in asked)
    assert text["commit_logp_raw"] == of_text["commit_logp_raw"] != turn["commit_logp_raw"]
    assert turn["commit_logp_raw"] == of_turn["commit_logp_raw"]
    # A typed prompt is a chat turn, unless --raw is given.
    typed = ("sample", str(checkpoints / "with"), "What is 2?", "gen_length=16", "block_length=8", "--json")
    for words, expected in (((), turn), (("--raw",), text)):
        (line,) = map(json.loads, d1(*typed, *words).out.splitlines())
        assert line["commit_logp_raw"] == expected["commit_logp_raw"]


def test_a_run_answers_at_the_schedule_that_counts_in_its_evaluation(
    ask: Callable, checkpoints: Path, tmp_path: Path
) -> None:
    run = tmp_path / "evaluated"
    shutil.copytree(checkpoints / "run", run)
    with (run / "recipe.yaml").open("a") as recipe:
        recipe.write("\nevaluation: {schedules: [{num_denoise_steps: 12}, {num_denoise_steps: 24}]}\n")
    (answer,) = ask([{"prompt_ids": [5]}], checkpoint=str(run)).lines
    assert (answer["num_tokens"], answer["num_forwards"]) == (24, 12)


def test_defaults_come_from_options_then_from_the_run_at_temperature_0(ask: Callable) -> None:
    asked = [{"prompt_ids": [5]}, {"prompt_ids": [5], "gen_length": 8}, {"prompt_ids": [5], "temperature": 1}]
    of_run, short, _ = ask(asked, checkpoint="run").lines
    assert (of_run["num_tokens"], of_run["num_forwards"]) == (24, 6)
    assert (short["num_tokens"], short["num_forwards"]) == (8, 4)
    assert set(of_run["commit_logp"]) == {0.0}
    assert ask(asked[:1], checkpoint="run/checkpoints/rl").lines == [of_run]
    first, *_ = ask(asked, "temperature=0.5", "gen_length=16", checkpoint="run").lines
    assert (first["num_tokens"], first["num_forwards"]) == (16, 8)
    assert set(first["commit_logp"]) != {0.0}
    by_option, by_line = ask(asked[2:], "seed=4").lines, ask([asked[2] | {"seed": 4}]).lines
    assert by_option == by_line != ask(asked[2:]).lines
    # Outside of a run the default is 256 tokens, but the policy has only 96 columns.
    (own,) = ask(asked[:1]).lines
    assert (own["num_tokens"], own["num_forwards"]) == (64, 32)


@pytest.mark.parametrize(
    ("given", "num_prompt_tokens", "expected"),
    [
        ({}, 10, (256, 32, 128)),
        ({"gen_length": 16}, 10, (16, 16, 8)),
        ({"gen_length": 64, "block_length": 64}, 10, (64, 64, 32)),
        ({"block_length": 1}, 10, (256, 1, 256)),
        ({"block_length": 7}, 10, (252, 7, 108)),
        ({}, 200, (96, 32, 48)),
        ({}, 290, (10, 10, 5)),
        ({"steps": 8}, 200, (96, 32, 8)),
    ],
)
def test_lengths_that_are_left_out_fit_into_the_policy(
    given: dict[str, int], num_prompt_tokens: int, expected: tuple[int, int, int]
) -> None:
    values = Defaults.of_policy(300).complete([given], num_prompt_tokens)
    assert (values["gen_length"], values["block_length"], values["steps"]) == expected


@pytest.mark.parametrize(
    ("given", "num_prompt_tokens", "expected"),
    [
        ({}, 10, (72, 8, 4)),
        ({}, 250, (48, 8, 4)),
        ({"gen_length": 128}, 10, (128, 8, 4)),
        ({"block_length": 2}, 10, (72, 2, 2)),
        ({"steps": 9}, 10, (72, 8, None)),
    ],
)
def test_a_checkpoint_may_state_its_length_and_blocks(
    given: dict[str, int], num_prompt_tokens: int, expected: tuple[int, int, int | None]
) -> None:
    stated = {"max_new_tokens": 75, "block_length": 8, "steps_per_block": 4}
    values = Defaults.of_policy(300, stated=stated).complete([given], num_prompt_tokens)
    assert (values["gen_length"], values["block_length"], values.get("steps_per_block")) == expected
    assert Defaults.of_policy(300, 4, stated).values["block_length"] == 4


@pytest.mark.parametrize(("length", "expected"), [(75, (64, 32, 32)), (20, (20, 20, 10))])
def test_a_stated_length_is_cut_to_blocks(length: int, expected: tuple[int, int, int]) -> None:
    values = Defaults.of_policy(300, stated={"max_new_tokens": length}).complete([], 10)
    assert (values["gen_length"], values["block_length"], values["steps"]) == expected


def test_a_stated_length_must_be_a_number(d1: Callable, checkpoints: Path, workdir: Path) -> None:
    shutil.copytree(checkpoints / "with", "model")
    (workdir / "model" / "generation_config.json").write_text('{"max_new_tokens": "many"}')
    d1("sample", "model", "What is 2 + 3?").assert_refused("generation_config.json has max_new_tokens 'many'")


@pytest.mark.parametrize(
    ("lower", "upper", "schedule", "parameters"),
    [
        ({"schedule": "quota"}, {"threshold": 0.9}, "threshold", {"threshold": 0.9}),
        ({"schedule": "threshold", "threshold": 0.8}, {"schedule": "quota"}, "quota", {}),
        ({"schedule": "threshold", "threshold": 0.8}, {"factor": 2}, "factor", {"factor": 2}),
        ({"schedule": "left_to_right"}, {"threshold": 0.9}, "left_to_right", {"threshold": 0.9}),
        ({"threshold": 0.8}, {"schedule": "threshold"}, "threshold", {"threshold": 0.8}),
    ],
)
def test_a_schedule_and_its_parameter_are_replaced_together(
    lower: dict[str, Any], upper: dict[str, Any], schedule: str, parameters: dict[str, float]
) -> None:
    values = overlay(lower, upper)
    assert values == {"schedule": schedule, **parameters}
    assert to_params(values).schedule == schedule


def test_a_parameter_stays_with_the_schedule_of_the_layer_below() -> None:
    defaults = Defaults.of_run(SamplingParams(schedule="left_to_right"))
    assert defaults.complete([{}, {"threshold": 0.9}], 1)["schedule"] == "left_to_right"


def test_cache_none_drops_the_refresh_steps() -> None:
    assert overlay({"cache": "dual", "cache_refresh_steps": 3}, {"cache": "none"}) == {"cache": "none"}


def test_the_help_lists_the_settings(d1: Callable) -> None:
    shown = d1("sample", "--help").out
    assert [key for key in SETTINGS if key not in shown] == []


def test_a_body_has_the_types_and_ranges_of_the_sampler() -> None:
    schema = Diffusion.model_json_schema()["properties"]
    assert schema["steps"]["anyOf"][0] == {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**31 - 1}
    assert schema["threshold"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert schema["remasking"]["anyOf"][0] == {"type": "string", "enum": [str(schedule) for schedule in Schedule]}
    assert schema["steps_per_block"]["description"].startswith("Denoise steps of each block, in place of `steps`.")
    names = {field.name for field in SAMPLING_FIELDS.values() if field.place is None}
    assert names == {"drawing", "cache", "cache_refresh_steps"}, "the service offers all others"


def test_every_parameter_reaches_the_sampler(ask: Callable) -> None:
    base = {"prompt_ids": [5, 6], **SHORT, "temperature": 1.0, "seed": 3}
    plain = ask([base]).lines[0]
    for change in (
        {"threshold": 0.02},
        {"factor": 30.0},
        {"entropy_bound": 9.0},
        {"schedule": "random"},
        {"schedule": "left_to_right"},
        {"drawing": "sample_then_select"},
        {"cfg_scale": 2.0},
        {"top_p": 0.1},
        {"top_k": 1},
        {"seed": 4},
        {"forbidden_ids": plain["token_ids"][:1]},
        {"fixed_tokens": {"2": 9}},
    ):
        (other,) = ask([base | change]).lines
        assert other["step_map"] != plain["step_map"] or other["token_ids"] != plain["token_ids"], change
    changes = {"fixed_tokens": {"2": 9}}, {"cache": "dual", "cache_refresh_steps": 2}, {"drawing": "sample_then_select"}
    fixed, cached, drawn = ask([base | change for change in changes]).lines
    assert (fixed["token_ids"][2], fixed["step_map"][2]) == (9, -1)
    assert (cached["exact"], drawn["logp_exact"]) == (False, False)


def test_weights_can_be_bfloat16(checkpoints: Path) -> None:
    policy = open_policy(str(checkpoints / "with"), "cpu", EngineConfig(dtype="bfloat16"))
    assert {parameter.dtype for parameter in policy.sampler.model.parameters()} == {torch.bfloat16}
    with pytest.raises(UserError, match="is no directory"):
        open_policy("no where", "cpu", EngineConfig())
