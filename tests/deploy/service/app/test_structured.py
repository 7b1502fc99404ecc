"""Structured outputs (schema, regex or choices), over HTTP and through an engine."""

import json
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deploy.requests.body import CompletionRequest
from tests.deploy.service.app.asking import ASK, CHAT, assert_error, events_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}},
    "required": ["b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
LONG = {"diffusion": {"gen_length": 48, "block_length": 16, "steps": 24}, "temperature": 1.0}


def expect_pair(text):
    said = json.loads(text)
    assert said.keys() in ({"b"}, {"a", "b"})
    assert said["b"] in ("x", None)
    assert type(said.get("a", 0)) is int


@pytest.mark.parametrize("seed", range(4))
def test_a_chat_answers_with_json_that_matches_the_schema(client, seed):
    body = client.post("/v1/chat/completions", json=CHAT | LONG | {"response_format": FORMAT, "seed": seed}).json()
    expect_pair(body["choices"][0]["message"]["content"])
    assert body["choices"][0]["finish_reason"] == "stop"


def test_all_choices_match_the_structure(client):
    outputs = {"structured_outputs": {"json": SCHEMA}}
    body = client.post("/v1/completions", json=ASK | LONG | outputs | {"n": 6, "logprobs": 0}).json()
    texts = [choice["text"] for choice in body["choices"]]
    for text in texts:
        expect_pair(text)
    assert len(set(texts)) > 1
    assert all(logp <= 0 for choice in body["choices"] for logp in choice["logprobs"]["token_logprobs"])


def test_a_text_that_fills_its_canvas_is_complete(client):
    """No end of text fits after it, but it was not cut off."""
    outputs = {"structured_outputs": {"regex": "[0-9]{8}"}}
    choice = client.post("/v1/completions", json=ASK | outputs | {"max_tokens": 8}).json()["choices"][0]
    assert re.fullmatch("[0-9]{8}", choice["text"])
    assert choice["finish_reason"] == "stop"


def test_choices_and_json_objects_are_supported(client):
    choices = ["yes (", "no|"]
    body = client.post("/v1/completions", json=ASK | {"structured_outputs": {"choice": choices}}).json()
    assert body["choices"][0]["text"] in choices
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        body = client.post("/v1/completions", json=ASK | LONG | asked).json()
        assert isinstance(json.loads(body["choices"][0]["text"]), dict)


@pytest.mark.parametrize("shows", ["committed", "canvas"])
def test_a_streamed_text_matches_the_structure(client, shows):
    asked = CHAT | LONG | {"response_format": FORMAT, "stream": True}
    whole = client.post("/v1/chat/completions", json=asked | {"stream": False}).json()["choices"][0]["message"][
        "content"
    ]
    asked["diffusion"] = asked["diffusion"] | {"stream": shows}
    events, is_done = events_of(client.post("/v1/chat/completions", json=asked))
    assert is_done
    parts = [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]
    expect_pair(whole)
    assert whole == ("".join(parts) if shows == "committed" else parts[-1] or parts[-2])
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


GIVEN = {"constraints": {"fixed": {"0": 5}}}
DEEP = json.loads('{"items":' * 200 + "{}" + "}" * 200)
LEAST = {"type": "integer", "minimum": 3}


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"type": "json_schema"}, "response_format", "has a `json_schema` where its `type` is"),
        ({"type": "xml"}, "response_format.type", "text"),
        ({"regex": "a"} | {"response_format": FORMAT}, "structured_outputs", "leave one out"),
        ({"stop": "}"}, "stop", "the text ends where it is complete"),
        ({"stop_token_ids": [5]}, "stop_token_ids", "the text ends where it is complete"),
        ({"ignore_eos": True}, "ignore_eos", "the text ends where it is complete"),
        ({"suffix": "x"}, "suffix", "which covers the whole text"),
        ({"max_tokens": 3}, "response_format", "needs 9 tokens at least, and the completion has room for 3"),
        ({"diffusion": GIVEN}, "response_format", "has no text that fits what is given or forbidden"),
        ({}, "structured_outputs", "has one of `json`, `json_object`, `regex` and `choice`"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs", "has one of"),
        ({"json": DEEP}, "structured_outputs.json", "is nested more than 64 levels deep"),
        ({"regex": "(a"}, "structured_outputs", "is not a supported regular expression"),
        ({"grammar": "a"}, "structured_outputs.grammar", "is not supported"),
        ({"json": LEAST}, "structured_outputs", "has 'minimum' with `type`, which is not served"),
    ],
)
def test_unsupported_structures_are_refused_by_the_bodys_field_name(client, asked, param, words):
    is_nested = param.startswith("structured_outputs")
    fields = CompletionRequest.model_fields.keys() - ({"regex"} if is_nested else set())
    body = {name: value for name, value in asked.items() if name in fields}
    own = {name: value for name, value in asked.items() if name not in body}
    if is_nested:
        body["structured_outputs"] = own
    else:
        body["response_format"] = own or FORMAT
    error = assert_error(client.post("/v1/completions", json=ASK | body), 400)
    assert words in error["message"]
    assert error["param"] == param


def test_the_choices_of_a_job_are_sent_with_a_single_copy_of_their_grammar(service):
    ask = CompletionRequest.model_validate(ASK | {"structured_outputs": {"regex": "[0-9]+"}, "n": 20})
    plan = service.planner.plan(ask)
    job = pickle.loads(pickle.dumps(service.planner.job(plan)))
    assert len(job.requests) == 20
    (grammar,) = {id(request.grammar): request.grammar for request in job.requests.values()}.values()
    assert grammar.digest == plan.grammar.digest


def test_a_request_that_waits_too_long_for_its_grammar_is_refused(app, service, client, monkeypatch):
    monkeypatch.setattr("deploy.service.api.inference.GRAMMAR_TIMEOUT_S", 0.3)
    free, begun, plan = threading.Event(), [], service.planner.plan

    def slow(ask):
        begun.append(ask)
        assert free.wait(20)
        return plan(ask)

    monkeypatch.setattr(service.planner, "plan", slow)

    def ask(digits):
        return client.post("/v1/completions", json=ASK | {"structured_outputs": {"regex": f"[0-9]{{{digits}}}"}})

    with ThreadPoolExecutor(3) as asking:
        answers = list(asking.map(ask, (1, 2, 3)))
    for answer in answers:
        assert "was not ready in 0 s" in assert_error(answer, 503)["message"]
        assert answer.headers["retry-after"] == "10"
    # The third request was still queued when it timed out, so it is never planned.
    free.set()
    monkeypatch.setattr("deploy.service.api.inference.GRAMMAR_TIMEOUT_S", 30.0)
    assert ask(4).status_code == 200
    assert len(begun) == 3
