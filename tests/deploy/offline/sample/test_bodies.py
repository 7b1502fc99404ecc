"""`d1 sample` of request bodies of the HTTP API: they mean the same as over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.offline.policy import open_policy
from deploy.offline.sample.prepare import make_planner
from deploy.requests.body import ChatRequest, CompletionRequest
from deploy.requests.line import read_line
from deploy.requests.planner import Planner
from deploy.service.api.text_codec import TextCodec
from learner.seeds import fold
from rollout.config import EngineConfig
from tests.deploy.offline.sample.asking import SHORT

BODY = {"prompt": [5, 6], "diffusion": SHORT}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (BODY, {"prompt_ids": [5, 6], **SHORT}),
        (BODY | {"seed": 3, "temperature": 1.5}, {"prompt_ids": [5, 6], **SHORT, "seed": 3, "temperature": 1.5}),
        (
            {"prompt": "What is 2?", "diffusion": SHORT | {"remasking": "random", "constraints": {"fixed": {"2": 9}}}},
            {"prompt": "What is 2?", **SHORT, "schedule": "random", "fixed_tokens": {"2": 9}},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "diffusion": SHORT},
            {"messages": [{"role": "user", "content": "hi"}], **SHORT},
        ),
        (BODY | {"model": "policy", "user": "me", "stream": True, "logprobs": None}, {"prompt_ids": [5, 6], **SHORT}),
        (BODY | {"diffusion": SHORT | {"steps": 2}, "steps": 16}, {"prompt_ids": [5, 6], **SHORT, "steps": 16}),
        (
            BODY | {"seed": -1, "top_k": -1, "top_p": 1.0, "best_of": 1, "skip_special_tokens": True, "min_p": 0.0},
            {"prompt_ids": [5, 6], **SHORT},
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "reasoning": "a"}], "diffusion": SHORT, "seed": 1.0},
            {"messages": [{"role": "assistant", "content": ""}], **SHORT, "seed": 1},
        ),
    ],
)
def test_a_body_is_answered_as_its_shorthand(body: dict, line: dict, ask: Callable) -> None:
    of_body, of_line = ask([body, line]).lines
    assert of_body | {"index": 1} == of_line


@pytest.mark.parametrize("checkpoint", ["with", "run"])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "What is 2?", "seed": 1},
        {"prompt": ["a", "b"], "n": 2, "seed": 1, "temperature": 1, "diffusion": {"gen_length": 16, "threshold": 0.9}},
        {"prompt": "2 +", "suffix": " is 3", "max_tokens": 4, "seed": 1},
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "seed": 1},
    ],
)
def test_the_command_plans_a_body_as_the_service_does(body: dict, checkpoint: str, checkpoints: Path) -> None:
    directory = checkpoints / ("run/checkpoints/rl" if checkpoint == "run" else checkpoint)
    policy = open_policy(str(directory), "cpu", EngineConfig())
    service = Planner(TextCodec(directory), policy.defaults)
    command = make_planner(policy, {})
    kind = ChatRequest if "messages" in body else CompletionRequest
    there, here = service.plan(kind.model_validate(body)), command.plan(read_line(body))
    assert [request.prompt_ids for request in here.requests] == [request.prompt_ids for request in there.requests]
    assert [request.params for request in here.requests] == [request.params for request in there.requests]
    assert [request.fixed_tokens for request in here.requests] == [request.fixed_tokens for request in there.requests]
    assert (here.most_tokens, here.num_gap_slots) == (there.most_tokens, there.num_gap_slots)
    # A single completion uses its seed itself as key, as plain lines always have.
    keys = [request.seed for request in here.requests]
    assert keys == ([1] if len(keys) == 1 else [request.seed for request in there.requests])


def test_each_of_several_completions_is_an_answer(ask: Callable) -> None:
    body = {"prompt": [[5], [6]], "n": 2, "seed": 3, "temperature": 1, "diffusion": SHORT, "id": "a"}
    answers = ask([{"prompt_ids": [9], **SHORT}, body])
    assert answers.status == 0
    assert [(line["index"], line.get("id"), line.get("choice")) for line in answers.lines] == [
        (0, None, None),
        *((1, "a", choice) for choice in range(4)),
    ]
    alone = {"prompt_ids": [6], **SHORT, "temperature": 1, "seed": fold(3, 1, 0)}
    assert ask([alone]).lines[0]["token_ids"] == answers.lines[3]["token_ids"]


def test_a_text_ends_after_max_tokens_or_before_a_stop_string(ask: Callable) -> None:
    (whole,) = ask([BODY]).lines
    (cut,) = ask([BODY | {"max_tokens": 5}]).lines
    assert (cut["num_tokens"], cut["token_ids"], cut["finish_reason"]) == (5, whole["token_ids"][:5], "length")
    assert cut["tail"]["token_ids"] == whole["token_ids"][5:]
    stop = whole["text"][4:6]
    (stopped,) = ask([BODY | {"stop": [stop, "never there"]}]).lines
    assert stopped["text"] == whole["text"][: whole["text"].find(stop)]
    assert stopped["finish_reason"] == "stop"
    assert stopped["num_tokens"] < whole["num_tokens"]


def test_a_gap_is_filled_between_prompt_and_suffix(ask: Callable) -> None:
    (answer,) = ask([{"prompt": "2 +", "suffix": " five", "max_tokens": 4, "block_length": 8}]).lines
    assert answer["num_tokens"] == 4
    assert answer["finish_reason"] == "stop"
    assert set(answer["tail"]["step_map"]) == {-1}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (BODY | {"diffusion": {"steps": 0}}, "diffusion.steps is 0; it should be greater than 0"),
        (BODY | {"diffusion": SHORT | {"steps": 7}}, "diffusion.steps 7 must be a multiple of the 2 blocks"),
        (BODY | {"diffusion": SHORT | {"threshold": 2}}, "diffusion.threshold is 2.0; it should be at most 1"),
        (BODY | {"diffusion": {"stepss": 3}}, "did you mean diffusion.steps?"),
        (
            BODY | {"diffusion": {"gen_length": 96}, "block_length": 8},
            "prompt of 2 and diffusion.gen_length 96 make",
        ),
        (
            BODY | {"diffusion": SHORT | {"constraints": {"fixed": {"16": 5}}}},
            "diffusion.constraints.fixed has slot 16; the completion has slots 0 to 15",
        ),
        (BODY | {"n": 33}, "n is 33; it should be at most 32"),
        (BODY | {"n": 32, "prompt": [[5], [6]]}, "A request has at most 32 choices"),
        (BODY | {"logprobs": 1}, "logprobs is 1; it should be 0"),
        (BODY | {"prompt": {"a": 1}}, "prompt is {'a': 1}; it should be text, token ids or a list of either"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5; it should be a string or a list"),
        ({"prompt": "a", "suffix": "b", "gen_length": 8}, "`gen_length` follows from `max_tokens` and `suffix`"),
    ],
)
def test_an_invalid_body_is_refused_with_its_field(body: dict, sentence: str, ask: Callable) -> None:
    answers = ask([body])
    assert answers.status == 2
    assert sentence in answers.lines[0]["error"]
    assert answers.err == f"d1: request 0 (line 1): {answers.lines[0]['error']}\n"


def test_a_stop_string_needs_a_tokenizer(ask: Callable) -> None:
    (answer,) = ask([BODY | {"stop": "a"}], checkpoint="bare").lines
    assert answer["error"].startswith("stop is text, and ")
