"""The HTTP application around a plain engine: formats, errors, and clients that mean no good."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from starlette.testclient import TestClient

from actors.registry import AdminState
from deploy.service.app import create_app, guarded
from deploy.service.codec import MASKED
from deploy.service.engine import Engine
from deploy.service.gate import MAX_BODY_BYTES, is_open
from deploy.service.keys import Keys
from deploy.service.messages import FollowerStatus
from deploy.service.rates import Rates
from learner.counter import fold
from rollout.request import Request

TOKEN = "a-token-of-this-test"
OTHER = "another-token-of-this-test"
WANTED = AdminState(pinned=1, is_paused=True)
STATUS = FollowerStatus(registry_reachable=True, num_errors=2, last_error="it was away", admin=WANTED)
ASK = {"prompt": "2 + 3", "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "2 + 3"}], "seed": 1}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def app(service, host):
    host._follower_status = lambda: STATUS
    return create_app(service)


@pytest.fixture
def make_client(app, open_client):
    """Clients of the application behind its gate."""

    def make(rate="1000000/second", headers=BEARER):
        return open_client(guarded(app, Keys.of(f"me:{TOKEN}\nyou:{OTHER}", "test"), Rates(rate)), headers)

    return make


@pytest.fixture
def client(make_client):
    return make_client()


def events_of(response):
    """The objects of a stream, and whether it ended with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"], lines[-1] == "[DONE]"


def assert_error(response, status, code=None):
    """An OpenAI error object, and nothing of the server's inside."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert error["message"].endswith(".")
    assert "Traceback" not in response.text
    if code is not None:
        assert error["code"] == code
    return error


def test_a_completion_has_openais_format(client):
    body = client.post("/v1/completions", json=ASK | {"model": "tiny", "n": 2, "max_tokens": 4}).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choices = body.pop("choices")
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(set(choice) == {"index", "text", "finish_reason", "logprobs"} for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    usage = body.pop("usage")
    assert usage["diffusion"] == {"num_forwards": 8, "num_blocks": 2, "tokens_per_forward": 1.0}
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "policy_version": 1,
        "system_fingerprint": "tiny-v1",
    }


def test_several_prompts_give_a_choice_each(client):
    assert len(client.post("/v1/completions", json={"prompt": ["1", "2", "3"]}).json()["choices"]) == 3
    assert len(client.post("/v1/completions", json={"prompt": [5, 6, 7]}).json()["choices"]) == 1


def test_health_is_open_and_says_little(client):
    expected = {"status": "ok", "policy_version": 1, "registry_reachable": True, "follower_errors": 2}
    assert client.get("/health", headers={"Authorization": ""}).json() == expected


@pytest.mark.parametrize("path", ["/v1/policy", "/v1/completions", "/nothing", "/openapi.json", "/health/", "/assets"])
@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"]
)
def test_without_the_token_there_is_nothing(client, path, value):
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
        ({"prompt": None}, "`prompt`: must be a string"),
        ({"prompt": []}, "`prompt`: must be a string"),
        ({"prompt": [1, "2"]}, "`prompt`: must be a string"),
        ({"prompt": [True]}, "`prompt`: must be a string"),
        ({"prompt": {"a": 1}}, "`prompt`: must be a string"),
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"max_tokens": "5"}, "`max_tokens`"),
        ({"temperature": -1}, "`temperature`"),
        ({"temperature": 3}, "`temperature`"),
        ({"seed": -1}, "`seed`"),
        ({"seed": 2**63}, "`seed`"),
        ({"n": 0}, "`n`"),
        ({"n": 33}, "`n`"),
        ({"n": 17, "prompt": ["1", "2"]}, "at most 32 choices"),
        ({"x\u0000 <script>": 1}, "a field, which this service does not know"),
        ({"prompt": "2 <|mdm_mask|>"}, "a special token"),
        ({"prompt": [0]}, "mask id"),
        ({"prompt": "x" * 500}, "this policy reads at most 48"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(client, change, words):
    assert words in assert_error(client.post("/v1/completions", json=ASK | change), 400)["message"]


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
def test_bodies_that_are_no_request_are_refused(client, content):
    assert_error(client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}), 400)
    assert client.get("/health").status_code == 200


def test_bodies_of_another_type_are_refused(client):
    assert_error(client.post("/v1/completions", content=b"prompt=1", headers={"Content-Type": "text/plain"}), 400)


def test_large_bodies_are_refused_whether_or_not_they_say_their_length(client):
    large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    assert_error(client.post("/v1/completions", content=large, headers=headers), 413)
    assert_error(client.post("/v1/completions", content=iter([large[:9], large[9:]]), headers=headers), 413)


def test_other_models_paths_and_methods_are_not_there(client):
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
    """All routes, those of included routers too."""
    for route in app.routes:
        yield from route.original_router.routes if hasattr(route, "original_router") else [route]


def test_every_route_is_closed_but_those_that_are_meant_to_be_open(app, make_client):
    """Deny by default: a route that is added is closed until somebody opens it."""
    client = make_client(headers={})
    walked = set()
    for route in routes_of(app):
        path = route.path.replace("{version}", "1").replace("{name}", "policy").replace("{name:path}", "main.js")
        for method in sorted(route.methods | {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"}):
            if not is_open(method, path):
                assert client.request(method, path).status_code == 401, (method, path)
                walked.add(path)
    assert {"/v1/completions", "/metrics", "/v1/policy/1", "/v1/run/samples", "/tokenize", "/version"} <= walked
    opened = {route.path for route in routes_of(app) if is_open("GET", route.path)}
    assert opened == {"/health", "/health/ready", "/-/healthz", "/", "/assets/{name:path}"}
    assert client.get("/").headers["content-security-policy"]
    assert client.get("/assets/main.js").status_code == 200
    assert_error(client.get("/assets/%2e%2e%2froutes.py"), 404)
    assert not is_open("POST", "/health")
    assert not is_open("GET", "/assets")
    assert not is_open("GET", "//health")


def test_each_key_opens_and_has_a_rate_of_its_own(make_client):
    client = make_client(rate="3/hour")
    assert [client.get("/version").status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = client.get("/version")
    error = assert_error(refused, 429, "rate_limit_exceeded")
    assert error["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert client.get("/version", headers={"Authorization": f"Bearer {OTHER}"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_request_has_a_name(client):
    assert client.get("/version", headers={"x-request-id": "mine-1.2"}).headers["x-request-id"] == "mine-1.2"
    for bad in ("a b", "x" * 200, "<script>", ""):
        named = client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert named != bad
        assert len(named) == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 1),
        ("logprobs", 0),
        ("echo", True),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("best_of", 2),
        ("tools", [{}]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, field, value):
    error = assert_error(client.post("/v1/completions", json=ASK | {field: value}), 400, "unsupported_parameter")
    assert error["param"] == field


def test_lm_evals_loglikelihood_is_refused_with_the_reason(client):
    body = {"model": "policy", "prompt": [[5, 6, 7]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    error = assert_error(client.post("/v1/completions", json=body), 400, "unsupported_parameter")
    assert "log-probabilities" in error["message"]


def test_unsupported_fields_that_ask_for_nothing_are_fine(client):
    nothing = {"logprobs": None, "echo": False, "best_of": 1, "presence_penalty": 0, "tools": [], "user": "me"}
    assert client.post("/v1/completions", json=ASK | nothing).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT | {"logprobs": False}).status_code == 200


@pytest.mark.parametrize(
    ("diffusion", "param"),
    [
        ({"steps": 7}, "diffusion.steps"),
        ({"block_length": 5}, "diffusion.block_length"),
        ({"remasking": "low_confidence"}, "diffusion.remasking"),
        ({"threshold": 2.0}, "diffusion.threshold"),
        ({"gen_length": 64}, "prompt"),
        ({"constraints": {"forbidden_ids": [10**6]}}, "diffusion.constraints.forbidden_ids"),
        ({"constraints": {"fixed": {"99": 5}}}, "diffusion.constraints.fixed"),
        ({"constraints": {"fixed": {"-1": 5}}}, "diffusion.constraints.fixed"),
        ({"stream": "all"}, "diffusion.stream"),
        ({"speed": 9}, "diffusion.speed"),
    ],
)
def test_what_the_sampler_cannot_do_is_refused_by_the_name_that_was_written(client, diffusion, param):
    error = assert_error(client.post("/v1/completions", json=ASK | {"diffusion": diffusion}), 400)
    assert error["param"] == param


# What is answered.


def expected_ids(service, make_sampler, ids=None, choice=0, version=1, **params):
    """What the sampler by itself says to ASK."""
    ids = ids if ids is not None else service.codec.encode_turn("2 + 3")
    plan = service.planner._defaults
    values = plan.complete([params], len(ids))
    from deploy.sampling.request_line import to_params

    request = Request(prompt_ids=tuple(ids), params=to_params(values), seed=fold(1, 0, choice))
    return make_sampler(version).generate([request])[0]


def test_an_answer_is_what_the_sampler_says(client, service, make_sampler):
    completion = expected_ids(service, make_sampler, temperature=1.0)
    text = service.codec.decode(completion.token_ids[: completion.num_tokens].tolist())
    body = client.post("/v1/completions", json=ASK | {"temperature": 1.0}).json()
    assert body["choices"][0]["text"] == text
    chat = client.post("/v1/chat/completions", json=CHAT | {"temperature": 1.0}).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": text}


def test_the_same_seed_gives_the_same_text_and_none_gives_another(client):
    def texts(**changes):
        body = client.post("/v1/completions", json=ASK | {"temperature": 1.0} | changes).json()
        return [choice["text"] for choice in body["choices"]]

    assert texts() == texts()
    assert texts(seed=2) != texts()
    assert len({texts(seed=None)[0] for _ in range(3)}) == 3
    both = texts(prompt=["2 + 3", "4"], n=2)
    assert len(set(both)) == 4
    assert both[:2] == texts(n=2)


def test_a_string_is_the_users_turn_and_ids_are_raw(client, service):
    ids = service.codec.encode_turn("2 + 3")
    texts = [
        client.post("/v1/completions", json=ASK | {"prompt": prompt}).json()["choices"][0]["text"]
        for prompt in ("2 + 3", ids, [ids], ["2 + 3"])
    ]
    assert len(set(texts)) == 1
    body = client.post("/v1/completions", json=ASK | {"prompt": [ids, ids[:-1]]}).json()
    assert len(body["choices"]) == 2
    assert body["usage"]["prompt_tokens"] == 2 * len(ids) - 1


def test_text_is_cut_after_max_tokens_and_costs_no_more_blocks(client):
    whole = client.post("/v1/completions", json=ASK).json()
    cut = client.post("/v1/completions", json=ASK | {"max_tokens": 3}).json()
    assert cut["usage"]["completion_tokens"] == 3
    assert cut["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["text"].startswith(cut["choices"][0]["text"].rstrip("\ufffd"))
    assert cut["usage"]["diffusion"]["num_blocks"] == 1 < whole["usage"]["diffusion"]["num_blocks"]
    # A client that says "at most 1000" is not asking for 1000.
    assert client.post("/v1/completions", json=ASK | {"max_tokens": 1000}).json()["choices"] == whole["choices"]


def test_a_text_ends_before_a_stop_string_whole_or_streamed(client):
    text = client.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
    stop = text[3:5]
    at = text.find(stop)
    body = client.post("/v1/completions", json=ASK | {"stop": [stop, "never"]}).json()
    assert body["choices"][0]["text"] == text[:at]
    assert body["choices"][0]["finish_reason"] == "stop"
    chunks, is_done = events_of(client.post("/v1/completions", json=ASK | {"stop": stop, "stream": True}))
    assert is_done
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text[:at]
    assert_error(client.post("/v1/completions", json=ASK | {"stop": ["a"] * 5}), 400)
    assert_error(client.post("/v1/completions", json=ASK | {"stop": [""]}), 400)


def test_a_stream_of_blocks_adds_up_to_the_whole_answer(client):
    ask = {"temperature": 1.0, "n": 2}
    whole = client.post("/v1/chat/completions", json=CHAT | ask).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/chat/completions", json=CHAT | ask | options)
    assert response.headers["x-policy-version"] == "1"
    chunks, is_done = events_of(response)
    assert is_done
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"]
        assert all(one["finish_reason"] is None for one in mine[:-1])
        assert len(mine) >= 4, "a role, two blocks, an end"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])


def test_a_stream_of_canvases_fills_in_and_ends_as_the_answer(client):
    whole = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
    for ask in ({"diffusing": True}, {"diffusion": {"stream": "canvas"}}):
        chunks, is_done = events_of(client.post("/v1/chat/completions", json=CHAT | {"stream": True} | ask))
        assert is_done
        frames = [choice for chunk in chunks for choice in chunk["choices"] if "diffusion" in choice]
        steps = [frame["diffusion"]["step"] for frame in frames]
        assert steps == sorted(steps)
        assert steps[0] == 0
        assert all(slot["masked"] for slot in frames[0]["diffusion"]["slots"])
        assert steps[-1] == frames[-1]["diffusion"]["num_steps"] == 8
        for frame in frames[:-1]:
            slots = frame["diffusion"]["slots"]
            assert len(slots) == 16
            assert frame["delta"]["content"].count(MASKED) == sum(slot["masked"] for slot in slots)
            for slot in slots:
                assert (slot["confidence"] is None) == (slot["step"] == -1) == slot["masked"]
        assert frames[-1]["delta"]["content"] == whole
        assert not any(slot["masked"] for slot in frames[-1]["diffusion"]["slots"])


def test_a_canvas_shows_given_tokens_as_it_goes_on_to_show_them(client):
    ask = {"constraints": {"fixed": {"3": 7}}, "stream": "canvas"}
    chunks, is_done = events_of(client.post("/v1/completions", json=ASK | {"stream": True, "diffusion": ask}))
    assert is_done
    first, *_, last = [chunk["choices"][0]["diffusion"]["slots"] for chunk in chunks if chunk["choices"]]
    assert first[3] == last[3]
    assert [index for index, slot in enumerate(first) if not slot["masked"]] == [3]


def test_a_step_map_comes_with_the_tokens_that_it_is_of(client, service, make_sampler):
    completion = expected_ids(service, make_sampler)
    ask = ASK | {"diffusion": {"return_step_map": True}}
    choice = client.post("/v1/completions", json=ask).json()["choices"][0]
    found = choice["diffusion"]
    assert found["token_ids"] == completion.token_ids[: completion.num_tokens].tolist()
    assert found["step_map"] == completion.step_map[: completion.num_tokens].tolist()
    assert found["confidence"] == pytest.approx(np.exp(completion.commit_logp_raw), abs=1e-3)
    assert len(found["tokens"]) == completion.num_tokens
    chunks, _ = events_of(client.post("/v1/completions", json=ask | {"stream": True}))
    assert [one["diffusion"] for chunk in chunks for one in chunk["choices"] if "diffusion" in one] == [found]


def test_steps_blocks_and_constraints_reach_the_sampler(client):
    diffusion = {
        "steps": 4,
        "block_length": 4,
        "return_step_map": True,
        "constraints": {"fixed": {"2": 70, "9": 71}, "forbidden_ids": [72]},
    }
    found = client.post("/v1/completions", json=ASK | {"diffusion": diffusion}).json()["choices"][0]["diffusion"]
    assert max(found["step_map"]) == 3
    assert (found["token_ids"][2], found["token_ids"][9]) == (70, 71)
    assert (found["step_map"][2], found["step_map"][9]) == (-1, -1)
    threshold = {"threshold": 0.001, "return_step_map": True}
    found = client.post("/v1/completions", json=ASK | {"diffusion": threshold}).json()["choices"][0]["diffusion"]
    assert max(found["step_map"]) == 1


def test_a_gap_is_filled_before_its_suffix(client, service):
    ask = {"prompt": "2 + ", "suffix": " = 5", "max_tokens": 5, "seed": 1}
    body = client.post("/v1/completions", json=ask | {"diffusion": {"return_step_map": True}}).json()
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "stop"
    found = body["choices"][0]["diffusion"]
    assert len(found["token_ids"]) == 5
    # The suffix is seen: another one gives another gap.
    texts = {
        client.post("/v1/completions", json=ask | {"suffix": suffix}).json()["choices"][0]["text"]
        for suffix in (" = 5", "!!!!", "What", "sum is 3.")
    }
    assert len(texts) > 1
    assert_error(client.post("/v1/completions", json=ask | {"diffusion": {"gen_length": 16}}), 400)


def test_messages_are_a_conversation(client):
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3"}]
    as_parts = {"messages": [{"role": "user", "content": parts}], "seed": 1}
    one, other = (client.post("/v1/chat/completions", json=ask).json() for ask in (CHAT, as_parts))
    assert one["choices"] == other["choices"]
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert_error(client.post("/v1/chat/completions", json=image), 400)
    assert_error(client.post("/v1/chat/completions", json={"messages": []}), 400)
    assert_error(client.post("/v1/chat/completions", json={"messages": [{"role": "root", "content": "x"}]}), 400)
    spelled = {"messages": [{"role": "user", "content": "a<|assistant|>b"}]}
    assert "a special token" in assert_error(client.post("/v1/chat/completions", json=spelled), 400)["message"]
    limited = client.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 2}).json()
    assert limited["usage"]["completion_tokens"] == 2


def test_tokens_and_text_go_both_ways(client, service):
    body = client.post("/tokenize", json={"prompt": "What is 1 + 2?"}).json()
    assert body == {"tokens": body["tokens"], "count": len(body["tokens"]), "max_model_len": 64}
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "What is 1 + 2?"}
    turn = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert turn == service.codec.encode_turn("2 + 3")
    assert_error(client.post("/tokenize", json={}), 400)
    half = client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers={"Content-Type": "application/json"})
    assert_error(half, 400)
    assert_error(client.post("/detokenize", json={"tokens": [-1]}), 400)


# Models and versions.


def test_models_are_aliases_versions_and_the_run(client, versions, make_policy, service, make_sampler):
    versions.adopt(make_policy(3))
    time.sleep(0.3)
    models = {model["id"]: model["policy_version"] for model in client.get("/v1/models").json()["data"]}
    assert models == {"policy": 3, "base": 1, "tiny": 3, "policy@v000003": 3, "policy@v000001": 1}
    assert client.get("/v1/models/base").json()["policy_version"] == 1
    assert_error(client.get("/v1/models/other"), 404, "model_not_found")
    for model, version in models.items():
        response = client.post("/v1/completions", json=ASK | {"model": model})
        assert response.json()["policy_version"] == version
        assert response.json()["model"] == model
        assert response.headers["x-policy-version"] == str(version)
    texts = {
        version: client.post("/v1/completions", json=ASK | {"model": f"policy@v00000{version}"}).json()["choices"]
        for version in (1, 3)
    }
    assert texts[1] != texts[3]


def test_the_policy_is_shown_with_its_score_and_what_stays_out(client, versions, make_policy):
    versions.adopt(make_policy(2, num_correct=3, num_problems=4, round=1, manifest_digest="abc"))

    def damaged(policy):
        raise ValueError("the checksum differs")

    versions._load = damaged
    versions.learn(make_policy(5))
    with pytest.raises(ValueError, match="checksum"):
        versions.adopt(make_policy(5))
    time.sleep(0.3)
    body = client.get("/v1/policy").json()
    score = body.pop("score")
    assert score["interval_95"][0] < 0.75 < score["interval_95"][1]
    assert (score["policy_version"], score["num_correct"], score["num_problems"]) == (2, 3, 4)
    assert body == {
        "run": "tiny",
        "policy_version": 2,
        "round": 1,
        "phase": "rl",
        "checksum": "abc",
        "lag": {"published": 5, "behind": 3},
        "canary": None,
        "aliases": {"policy": 2, "base": 1},
        "pinned": 1,
        "paused": True,
        "live": [1, 2],
        "num_swaps": 1,
        "refused": [{"version": 5, "why": "Policy version 5 is not served: the checksum differs"}],
        "last_error": "it was away",
    }
    assert client.get("/v1/policy/2").json()["is_serving"]
    assert not client.get("/v1/policy/1").json()["is_serving"]
    assert_error(client.get("/v1/policy/77"), 404)
    assert_error(client.get("/v1/policy/-1"), 400)
    assert_error(client.get("/v1/policy/..%2f"), 404)


# Failures.


def test_a_failure_of_the_engine_tells_the_client_nothing(client, engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("secret /path")

    monkeypatch.setattr(engine, "submit", fail)
    response = client.post("/v1/completions", json=ASK)
    assert assert_error(response, 500)["type"] == "server_error"
    assert "secret" not in response.text


def test_too_much_is_refused_in_openais_words(client, engine, app, service):
    engine._max_pending = 2
    response = client.post("/v1/completions", json=ASK | {"n": 3})
    assert assert_error(response, 429, "overloaded")["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "1"
    streamed = client.post("/v1/completions", json=ASK | {"n": 3, "stream": True})
    assert_error(streamed, 429, "overloaded")
    app.state.inference._num_open = service.max_open
    assert_error(client.post("/v1/completions", json=ASK), 429, "overloaded")
    app.state.inference._num_open = 0
    assert client.post("/v1/completions", json=ASK).status_code == 200
    assert app.state.inference.num_open == 0


def test_a_draining_service_says_so(client, app):
    assert client.get("/health/ready").json()["status"] == "ready"
    assert client.get("/-/healthz").text == "success"
    app.state.inference.is_draining = True
    for path in ("/health/ready", "/-/healthz"):
        assert_error(client.get(path), 503)
    for response in (client.post("/v1/completions", json=ASK), client.get("/health/ready")):
        assert_error(response, 503)
        assert response.headers["retry-after"]
    assert client.get("/health").status_code == 200


def test_a_stream_that_breaks_ends_with_an_error_and_no_clean_end(mortal_service):
    app = create_app(mortal_service)
    inside = guarded(app, Keys.of(TOKEN, "test"), Rates("1000/second"))
    with TestClient(inside, headers=BEARER) as client:
        chunks, is_done = events_of(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        assert not is_done
        assert chunks[-1]["error"]["code"] == "engine_unavailable"
        assert all("error" not in chunk for chunk in chunks[:-1])
        assert len(chunks) > 1
        assert_error(client.post("/v1/completions", json=ASK), 503, "engine_unavailable")
    assert app.state.inference.num_open == 0


def test_a_job_that_takes_too_long_is_given_up(client, service, monkeypatch):
    service.planner._timeout_s = 0.2
    step = Engine._step
    monkeypatch.setattr(Engine, "_step", lambda self, live: time.sleep(0.3) or step(self, live))
    response = client.post("/v1/completions", json=ASK)
    assert_error(response, 503, "timeout")
    assert response.headers["retry-after"] == "1"


# The run.


def write_run(run_dir):
    lines = [
        {"event": "run", "time_s": 0.0, "began_at": 1.7e9},
        {"event": "phase", "time_s": 1.0, "phase": "rl", "num_steps": 9},
        {"event": "round", "time_s": 2.0, "reward": float("nan"), "parts": [{"x": float("inf")}]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text + "no json\n[1]\n" + '{"event": "torn')
    samples = "".join(json.dumps({"round": index, "completion": "<b>"}) + "\n" for index in range(30))
    (run_dir / "samples.jsonl").write_text(samples)


def test_a_run_is_read_as_it_stands(client, run_dir):
    write_run(run_dir)
    summary = client.get("/v1/run").json()
    assert summary["recipe"]["task"] == {"name": "sums"}
    summary.pop("recipe")
    assert summary == {"name": "tiny", "began_at": 1.7e9, "phase": "rl", "num_rounds": 1}
    body = client.get("/v1/run/events?after=0").json()
    assert (len(body["events"]), body["next"]) == (3, 3)
    assert body["events"][2] == {"event": "round", "time_s": 2.0, "reward": None, "parts": [{"x": None}]}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('"}\n{"event": "done", "time_s": 3}\n')
    body = client.get("/v1/run/events?after=3").json()
    assert ([event["event"] for event in body["events"]], body["next"]) == (["torn", "done"], 5)
    assert client.get("/v1/run/events?after=5").json() == {"events": [], "next": 5}
    assert client.get("/v1/run").json()["phase"] == "done"
    samples = client.get("/v1/run/samples?limit=2").json()["samples"]
    assert [sample["round"] for sample in samples] == [28, 29]
    for path in ("/v1/run/samples?limit=0", "/v1/run/samples?limit=x", "/v1/run/events?after=-1"):
        assert_error(client.get(path), 400)
    pools = client.get("/v1/run/pools").json()
    assert pools["replicas"] == [{"id": "local", "policy_version": 1, "healthy": True, "running": 0, "waiting": 0}]
    assert pools["follower"] == {"registry_reachable": True, "num_errors": 2, "last_error": "it was away"}


def test_a_checkpoint_by_itself_has_no_run(service):
    inside = guarded(create_app(replace(service, run=None)), Keys.of(TOKEN, "test"), Rates("1000/second"))
    with TestClient(inside, headers=BEARER) as client:
        for path in ("", "/events", "/samples", "/pools"):
            assert_error(client.get(f"/v1/run{path}"), 404, "no_run")


def test_metrics_are_in_prometheus_format(client):
    client.post("/v1/completions", json=ASK)
    client.get("/v1/nothing/at/all")
    text = client.get("/metrics").text
    assert 'd1_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'd1_requests_total{path="other",status="404"} 1.0' in text
    assert "d1_policy_version 1.0" in text
    assert 'd1_choices_running{replica="local"} 0.0' in text


def test_what_the_gate_refuses_is_counted_too(make_client):
    make_client(headers={}).get("/v1/models")
    busy = make_client("1/minute")
    assert [busy.get("/v1/models").status_code for _ in range(2)] == [200, 429]
    text = make_client().get("/metrics").text
    for status in (200, 401, 429):
        assert f'd1_requests_total{{path="/v1/models",status="{status}"}} 1.0' in text
