"""The HTTP application around a plain engine: formats, errors, and clients that mean no good."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice

import pytest
from starlette.testclient import TestClient

from deploy.service import app as app_module
from deploy.service.app import MAX_BODY_BYTES, create_app, digest_of
from deploy.service.follower import FollowerStatus

TOKEN = "a-token-of-this-test"
STATUS = FollowerStatus(registry_reachable=True, num_errors=2, last_error="it was away")
ASK = {"prompt": "2 + 3", "seed": 1}


@pytest.fixture
def client(engine):
    app = create_app(engine, "tiny", digest_of(TOKEN), lambda: STATUS)
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=False) as client:
        yield client


def assert_error(response, status, code=None):
    """An OpenAI error object, and nothing of the server's inside."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code"}
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


def test_the_policy_is_shown_with_its_score(client, engine, make_policy, make_sampler):
    assert client.get("/v1/policy").json()["score"] is None
    engine.swap(make_sampler(2), make_policy(2, num_correct=3, num_problems=4, round=1))
    body = client.get("/v1/policy").json()
    score = body.pop("score")
    assert score["interval_95"][0] < 0.75 < score["interval_95"][1]
    assert (score["policy_version"], score["num_correct"], score["num_problems"]) == (2, 3, 4)
    assert score["accuracy"] == 0.75
    assert body == {
        "run": "tiny",
        "policy_version": 2,
        "round": 1,
        "phase": "rl",
        "num_swaps": 1,
        "last_follower_error": "it was away",
    }


def test_health_is_open_and_says_little(client):
    expected = {"status": "ok", "policy_version": 1, "registry_reachable": True, "follower_errors": 2}
    assert client.get("/health", headers={"Authorization": ""}).json() == expected


@pytest.mark.parametrize(
    "path", ["/v1/policy", "/v1/completions", "/", "/nothing", "/openapi.json", "/health/", "//health"]
)
@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"]
)
def test_without_the_token_there_is_nothing(client, path, value):
    headers = {"Authorization": value.encode("latin-1")}
    error = assert_error(client.get(path, headers=headers), 401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    assert_error(client.post(path, headers=headers, content=b"{"), 401)


def test_a_request_without_any_authorization_header_is_refused(engine):
    with TestClient(create_app(engine, "tiny", digest_of(TOKEN), lambda: STATUS)) as client:
        response = client.get("/v1/policy")
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
        ({"max_tokens": 17}, "at most 16 tokens"),
        ({"temperature": -1}, "`temperature`"),
        ({"temperature": 3}, "`temperature`"),
        ({"seed": -1}, "`seed`"),
        ({"seed": 2**63}, "`seed`"),
        ({"n": 0}, "`n`"),
        ({"n": 33}, "`n`"),
        ({"n": 17, "prompt": ["1", "2"]}, "at most 32 choices"),
        ({"stream": True}, "`stream`, which this service does not know"),
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
    assert_error(client.post("/v1/completions", json=ASK | {"model": "gpt-5"}), 404, "model_not_found")
    assert_error(client.get("/v1/nothing"), 404)
    assert_error(client.get("/docs"), 404)
    assert_error(client.get("/v1/completions"), 405)


def test_a_failure_of_the_engine_tells_the_client_nothing(client, engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("secret /path")

    monkeypatch.setattr(engine, "complete", fail)
    response = client.post("/v1/completions", json=ASK)
    assert assert_error(response, 500)["type"] == "server_error"
    assert "secret" not in response.text


def test_a_full_queue_is_said_at_once_and_health_still_answers(client, engine, monkeypatch):
    complete, may_go_on = engine.complete, threading.Event()

    def wait(*args, **kwargs):
        assert may_go_on.wait(60)
        return complete(*args, **kwargs)

    monkeypatch.setattr(engine, "complete", wait)
    num_posts = app_module.MAX_PENDING + 3
    with ThreadPoolExecutor(num_posts) as pool:
        posts = [pool.submit(client.post, "/v1/completions", json=ASK) for _ in range(num_posts)]
        refused = [post.result() for post in islice(as_completed(posts, timeout=60), 3)]
        for response in refused:
            assert_error(response, 503, "overloaded")
            assert response.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200
        may_go_on.set()
        answers = [post.result(60).status_code for post in posts]
    assert sorted(answers) == [200] * app_module.MAX_PENDING + [503] * 3
    assert client.post("/v1/completions", json=ASK).status_code == 200


def test_an_answer_that_takes_too_long_is_given_up(client, engine, monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(app_module, "_ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(engine, "complete", lambda *_, **__: may_go_on.wait(20))
    assert_error(client.post("/v1/completions", json=ASK), 503, "timeout")
    may_go_on.set()
