"""Refused requests: authentication, limits and validation, with their messages."""

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import ValidationError

from deploy.requests.body import MAX_CHARACTERS, ChatRequest, CompletionRequest
from deploy.requests.parameters import Constraints, Diffusion
from deploy.service.gateway.access import MAX_BODY_BYTES, is_open
from tests.deploy.service.app.asking import ASK, CHAT, OTHER, TOKEN, assert_error


def test_health_needs_no_key_and_reveals_little(client):
    expected = {"status": "ok", "policy_version": 1, "registry_reachable": True, "follower_errors": 2}
    assert client.get("/health", headers={"Authorization": ""}).json() == expected


@pytest.mark.parametrize("path", ["/v1/policy", "/v1/completions", "/nothing", "/openapi.json", "/health/", "/assets"])
@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"]
)
def test_every_request_without_a_valid_key_is_refused(client, path, value):
    headers = {"Authorization": value.encode("latin-1")}
    error = assert_error(client.get(path, headers=headers), 401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    assert_error(client.post(path, headers=headers, content=b"{"), 401)


def test_a_request_without_any_authorization_header_is_refused(make_client):
    response = make_client(headers={}).get("/v1/policy")
    assert_error(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None}, "`prompt`: Field required"),
        ({"prompt": []}, "`prompt`: must be a string"),
        ({"prompt": [1, "2"]}, "`prompt`: must be a string"),
        ({"prompt": [True]}, "`prompt`: must be a string"),
        ({"prompt": {"a": 1}}, "`prompt`: must be a string"),
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"max_tokens": "5"}, "`max_tokens`"),
        ({"temperature": -1}, "`temperature`"),
        ({"temperature": 3}, "`temperature`"),
        ({"seed": -(2**63) - 1}, "`seed`"),
        ({"top_k": -2}, "`top_k`"),
        ({"seed": 2**63}, "`seed`"),
        ({"n": 0}, "`n`"),
        ({"n": 33}, "`n`"),
        ({"n": 17, "prompt": ["1", "2"]}, "at most 32 choices"),
        ({"x\u0000 <script>": 1}, "a field, which this service does not know"),
        ({"prompt": "2 <|mdm_mask|>"}, "mask id"),
        ({"stop_token_ids": [-1]}, "`stop_token_ids`"),
        ({"stop_token_ids": [1] * 17}, "`stop_token_ids`"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids has 1000000"),
        ({"ignore_eos": 1}, "`ignore_eos`"),
        ({f"a{number}": 1 for number in range(257)}, "the body has 259 fields"),
        ({"diffusion": {f"a{number}": 1 for number in range(257)}}, "has 257 fields"),
        ({"logprobs": 1}, "`logprobs`: must be 0: only the log-probability of each committed token"),
        ({"logprobs": False}, "`logprobs`: must be 0"),
        ({"suffix": "2" * 60}, "as many as without `max_tokens`"),
        ({"prompt": [0]}, "mask id"),
        ({"prompt": "x" * 500}, "this policy reads at most 48"),
    ],
)
def test_invalid_values_are_refused_in_a_sentence(client, change, words):
    assert words in assert_error(client.post("/v1/completions", json=ASK | change), 400)["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", "2" * 500),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "2" * 500}]),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_by_its_field_name(client, path, field, value):
    error = assert_error(client.post(path, json={field: value}), 400)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["1", "\\ud800"]}',
        b'{"\\ud800": 1, "prompt": "1"}',
        b'{"prompt": "1", "temperature": NaN}',
        b'{"prompt": "1", "temperature": Infinity}',
        b'{"prompt": "1", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": [' + b"1," * 60_000 + b"1]}",
    ],
)
def test_bodies_that_are_not_requests_are_refused(client, content):
    assert_error(client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}), 400)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a"] * 33}, "prompt"),
        ("/v1/completions", {"prompt": [[5]] * 33}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 17, "n": 2}, "n"),
        ("/v1/completions", {"prompt": [[5]] * 17, "n": 2}, "n"),
        ("/v1/completions", {"prompt": "a" * (MAX_CHARACTERS + 1)}, "prompt"),
        ("/v1/completions", {"prompt": ["a" * (MAX_CHARACTERS // 2 + 1)] * 2}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "a" * 65537}, "suffix"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 257}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * MAX_CHARACTERS}] * 2}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * MAX_CHARACTERS}] * 2}, "messages"),
        ("/tokenize", {"prompt": "a" * (MAX_CHARACTERS + 1)}, "prompt"),
    ],
)
def test_long_texts_are_refused_before_tokenization(client, service, monkeypatch, path, body, param):
    def tokenize(*_):
        raise AssertionError("this takes time")

    for name in ("encode_chat", "encode_plain"):
        monkeypatch.setattr(service.codec._tokenizer, name, tokenize)
    assert assert_error(client.post(path, json=body), 400, "invalid_value")["param"] == param


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionRequest, {"prompt": "a", "stop": [1] * 1000}, ("stop",)),
        (CompletionRequest, {"prompt": [1.5] * 1000}, ("prompt",)),
        (Constraints, {"fixed": {str(slot): "a" for slot in range(1000)}}, ("fixed",)),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}, ("messages", 0, "content")),
    ],
)
def test_a_repeated_error_is_reported_once(kind, body, field):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert [error["loc"] for error in refused.value.errors()] == [field]


def test_the_schema_states_the_maximum_number_of_prompts(client):
    prompt = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert [kind.get("maxItems") for kind in prompt["anyOf"]] == [None, 32, None, 32]


def test_bodies_of_another_type_are_refused(client):
    assert_error(client.post("/v1/completions", content=b"prompt=1", headers={"Content-Type": "text/plain"}), 400)


def test_large_bodies_are_refused_with_or_without_content_length(client):
    large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    assert_error(client.post("/v1/completions", content=large, headers=headers), 413)
    assert_error(client.post("/v1/completions", content=iter([large[:9], large[9:]]), headers=headers), 413)


def test_unknown_models_paths_and_methods_are_refused(client):
    error = assert_error(client.post("/v1/completions", json=ASK | {"model": "gpt-5"}), 404, "model_not_found")
    assert error["param"] == "model"
    assert_error(client.post("/v1/completions", json=ASK | {"model": "policy@v000077"}), 404, "model_not_found")
    assert_error(client.get("/v1/models/..%2f..%2fetc"), 404)
    assert_error(client.get("/v1/nothing"), 404)
    assert_error(client.get("/docs"), 404)
    wrong = client.get("/v1/completions")
    assert_error(wrong, 405)
    assert wrong.headers["allow"] == "POST"


def routes_of(app):
    """Yield all routes, including those of included routers."""
    for route in app.routes:
        yield from route.original_router.routes if hasattr(route, "original_router") else [route]


def test_every_route_needs_a_key_except_the_open_ones(app, make_client):
    """Deny by default: a new route is closed until it is opened explicitly."""
    client = make_client(headers={})
    walked = set()
    for route in routes_of(app):
        path = route.path.replace("{version}", "1").replace("{name}", "policy").replace("{name:path}", "main.js")
        for method in sorted(route.methods | {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"}):
            if not is_open(method, path):
                assert client.request(method, path).status_code == 401, (method, path)
                walked.add(path)
    assert {"/v1/completions", "/metrics", "/v1/policy/1", "/v1/policy/examples", "/tokenize", "/version"} <= walked
    opened = {route.path for route in routes_of(app) if is_open("GET", route.path)}
    assert opened == {"/health", "/health/ready", "/ping", "/", "/assets/{name:path}"}
    assert client.get("/").headers["content-security-policy"]
    assert client.get("/assets/main.js").status_code == 200
    assert_error(client.get("/assets/%2e%2e%2froutes.py"), 404)
    assert not is_open("POST", "/health")
    assert not is_open("GET", "/assets")
    assert not is_open("GET", "//health")


def test_each_key_is_accepted_and_has_its_own_rate_limit(make_client):
    client = make_client(rate="3/day")
    assert [client.get("/version").status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = client.get("/version")
    error = assert_error(refused, 429, "rate_limit_exceeded")
    assert error["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert client.get("/version", headers={"Authorization": f"Bearer {OTHER}"}).status_code == 200
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 2),
        ("echo", True),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("best_of", 2),
        ("tools", [{}]),
        ("min_tokens", 3),
    ],
)
def test_unsupported_fields_are_refused_by_name(client, field, value):
    error = assert_error(client.post("/v1/completions", json=ASK | {field: value}), 400, "unsupported_parameter")
    assert error["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("refusal", "No."), ("tool_calls", [{}]), ("function_call", {}), ("audio", {"id": "a"}), ("annotations", [{}])],
)
def test_unsupported_fields_of_a_turn_are_refused_by_name(client, field, value):
    turn = {"role": "assistant", "content": "5", field: value}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = assert_error(client.post(path, json={"messages": [turn]}), 400, "unsupported_parameter")
        assert error["param"] == f"messages.{field}"
        assert f"`messages.{field}`" in error["message"]


@pytest.mark.parametrize(
    ("part", "words", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of the type `image_url`", "messages.content"),
        ({"type": "input_audio", "input_audio": {}}, "a part of the type `input_audio`", "messages.content"),
        ({"type": "text", "text": 5}, "a valid string", "messages.content.text"),
        ({"type": "text", "text": "x", "cache": {}}, "does not know", "messages.content.cache"),
        ({"type": "video", "text": "x"}, "should be 'text'", "messages.content.type"),
        ({"text": "x"}, "Field required", "messages.content.type"),
        (5, "a valid dictionary", "messages.content"),
    ],
)
def test_content_parts_other_than_text_are_refused_by_type(client, part, words, param):
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    error = assert_error(client.post("/v1/chat/completions", json=parts), 400)
    assert words in error["message"]
    assert error["param"] == param
    content = assert_error(
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": 5}]}), 400
    )
    assert content["message"] == "`messages.content`: must be a string or a list of parts."


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", b'{"prompt": ["1", "\\ud800"]}', "prompt"),
        ("/v1/completions", b'{"prompt": "1", "suffix": "\\ud800"}', "suffix"),
        ("/v1/completions", b'{"prompt": "1", "stop": "\\ud800"}', "stop"),
        ("/v1/completions", b'{"prompt": "1", "stop": ["1", "\\ud800"]}', "stop"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        ("/tokenize", b'{"prompt": "\\ud800"}', "prompt"),
    ],
)
def test_lone_surrogates_are_refused_by_field(client, path, body, field):
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert assert_error(answer, 400, "invalid_value")["param"] == field


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"diffusing": True}, "diffusing"),
        ({"diffusion": {"stream": "canvas"}}, "diffusion.stream"),
    ],
)
def test_stream_options_are_refused_without_a_stream(client, asked, field):
    error = assert_error(client.post("/v1/completions", json=ASK | asked), 400, "invalid_value")
    assert error["param"] == field
    assert f"`{field}`" in error["message"]
    assert client.post("/v1/completions", json=ASK | asked | {"stream": True}).status_code == 200


def test_obfuscation_is_refused_by_name(client):
    asked = ASK | {"stream": True, "stream_options": {"include_obfuscation": True}}
    error = assert_error(client.post("/v1/completions", json=asked), 400, "unsupported_parameter")
    assert error["param"] == "stream_options.include_obfuscation"
    asked["stream_options"] = {"include_obfuscation": False}
    assert client.post("/v1/completions", json=asked).status_code == 200


def test_fixed_tokens_inside_the_suffix_are_refused(client):
    ask = {"prompt": "2", "suffix": " is", "max_tokens": 4}
    for slot, status in (("3", 200), ("4", 400), ("99", 400)):
        answer = client.post("/v1/completions", json=ask | {"diffusion": {"constraints": {"fixed": {slot: 7}}}})
        assert answer.status_code == status
    error = assert_error(answer, 400, "invalid_value")
    assert error["param"] == "diffusion.constraints.fixed"
    assert "slots 0 to 3" in error["message"]


def test_lm_evals_loglikelihood_is_refused_with_the_reason(client):
    body = {"model": "policy", "prompt": [[5, 6, 7]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    error = assert_error(client.post("/v1/completions", json=body), 400, "unsupported_parameter")
    assert "log-probabilities" in error["message"]


def test_unsupported_fields_with_neutral_values_are_accepted(client):
    nothing = {"logprobs": None, "echo": False, "best_of": 1, "presence_penalty": 0, "tools": [], "user": "me"}
    assert client.post("/v1/completions", json=ASK | nothing).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT | {"logprobs": False}).status_code == 200


@pytest.mark.parametrize(
    "nulls",
    [
        *({field: None} for field in CompletionRequest.model_fields if field not in ASK),
        *({field: None} for field in CompletionRequest.ignored_values),
        *({"diffusion": {field: None}} for field in Diffusion.model_fields),
        {"diffusion": {"constraints": {"forbidden_ids": None, "fixed": None}}},
    ],
    ids=str,
)
def test_null_fields_count_as_absent(client, nulls):
    plain = client.post("/v1/completions", json=ASK).json()["choices"]
    assert client.post("/v1/completions", json=ASK | nulls).json()["choices"] == plain


def test_null_stream_options_count_as_absent(client):
    options = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    assert client.post("/v1/completions", json=ASK | options).status_code == 200


def test_a_turn_dumped_by_openai_python_is_accepted(client):
    said = ChatCompletionMessage(role="assistant", content="5").model_dump()
    assert said["tool_calls"] is None
    replayed = {"messages": [*CHAT["messages"], said | {"annotations": []}, *CHAT["messages"]], "seed": 1}
    plain = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "5"}, *CHAT["messages"]], "seed": 1}
    one, other = (client.post("/v1/chat/completions", json=ask).json() for ask in (replayed, plain))
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("diffusion", "param"),
    [
        ({"steps": 7}, "diffusion.steps"),
        ({"block_length": 5}, "diffusion.block_length"),
        ({"remasking": "low_confidence"}, "diffusion.remasking"),
        ({"threshold": 2.0}, "diffusion.threshold"),
        ({"editing_threshold": 2.0}, "diffusion.editing_threshold"),
        ({"threshold": 0.5, "editing_threshold": 0.5}, "diffusion.editing_threshold"),
        ({"max_post_steps": 0}, "diffusion.max_post_steps"),
        ({"gen_length": 64}, "prompt"),
        ({"constraints": {"forbidden_ids": [10**6]}}, "diffusion.constraints.forbidden_ids"),
        ({"constraints": {"fixed": {"99": 5}}}, "diffusion.constraints.fixed"),
        ({"constraints": {"fixed": {"-1": 5}}}, "diffusion.constraints.fixed"),
        ({"constraints": {"fixed": {"0": "a"}}}, "diffusion.constraints.fixed"),
        ({"constraints": {"fixed": [5]}}, "diffusion.constraints.fixed"),
        ({"stream": "all"}, "diffusion.stream"),
        ({"speed": 9}, "diffusion.speed"),
    ],
)
def test_sampler_errors_use_the_field_names_of_the_body(client, diffusion, param):
    error = assert_error(client.post("/v1/completions", json=ASK | {"diffusion": diffusion}), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASK | {"diffusing": True}),
        ("/v1/completions", ASK | {"logprobs": 1}),
        ("/v1/completions", ASK | {"diffusion": {"steps": 7}}),
        ("/v1/completions", ASK | {"n": 17, "prompt": ["1", "2"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
)
def test_an_error_message_has_one_full_stop(client, path, body):
    assert not assert_error(client.post(path, json=body), 400)["message"].endswith("..")
