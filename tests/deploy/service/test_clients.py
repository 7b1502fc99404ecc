"""Clients that no one here wrote, against the application on a socket."""

import asyncio
import json
import subprocess
import threading
import time

import httpx
import openai
import pytest
import uvicorn

from deploy.service.app import create_app, guarded
from deploy.service.gate import Rates
from deploy.service.keys import Keys

TOKEN = "a-token-of-this-test"
MESSAGES = [{"role": "user", "content": "2 + 3"}]


@pytest.fixture
def url(service, free_port):
    app = guarded(create_app(service), Keys.of(TOKEN, "test"), Rates("1000000/second"))
    config = uvicorn.Config(app, host="127.0.0.1", port=free_port, log_level="error", lifespan="on", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{free_port}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=30) as client:
        yield client


def test_openai_python_asks_and_is_answered(client):
    answer = client.chat.completions.create(model="policy", messages=MESSAGES, seed=1, n=2, temperature=1)
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id
    text = client.completions.create(model="policy", prompt="2 + 3", seed=1, max_tokens=5)
    assert text.usage.completion_tokens == 5
    assert text.model_extra["policy_version"] == 1
    raw = client.chat.completions.with_raw_response.create(model="policy", messages=MESSAGES)
    assert raw.headers["x-policy-version"] == "1"
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    assert {model.id for model in client.models.list()} == {"policy", "base", "tiny", "policy@v000001"}
    assert client.models.retrieve("base").id == "base"


def test_openai_python_streams(client):
    ask = {"model": "policy", "messages": MESSAGES, "seed": 1, "temperature": 1}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    texts = client.completions.create(model="policy", prompt=["2 + 3", "4"], stream=True, seed=1)
    assert {choice.index for chunk in texts for choice in chunk.choices} == {0, 1}
    diffusing = client.chat.completions.create(**ask, stream=True, extra_body={"diffusing": True})
    frames = [chunk.choices[0] for chunk in diffusing if "diffusion" in (chunk.choices[0].model_extra or {})]
    assert frames[-1].delta.content == whole.choices[0].message.content
    assert len(frames) > 4


def test_openai_python_asks_asynchronously_all_at_once(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=60) as client:
            asks = [
                client.chat.completions.create(model="policy", messages=MESSAGES, seed=seed % 4, temperature=1)
                for seed in range(16)
            ]
            answers = await asyncio.gather(*asks)
            stream = await client.chat.completions.create(
                model="policy", messages=MESSAGES, seed=1, temperature=1, stream=True
            )
            return answers, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers, streamed = asyncio.run(ask())
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[:4] * 4 == texts
    assert len(set(texts[:4])) == 4
    assert streamed == texts[1]


def test_openai_python_raises_its_own_errors(client, url):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="policy", prompt="x", logprobs=1)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "logprobs")
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def test_openai_python_tries_again_when_it_is_told_to(client, engine, monkeypatch):
    engine._max_pending = 0
    submit, num_tries = engine.submit, []

    def count(*arguments):
        num_tries.append(1)
        if len(num_tries) == 3:
            engine._max_pending = 100
        return submit(*arguments)

    monkeypatch.setattr(engine, "submit", count)
    began = time.monotonic()
    assert client.completions.create(model="policy", prompt="x").choices
    assert len(num_tries) == 3
    assert time.monotonic() - began > 1.8, "Retry-After says a second"
    engine._max_pending = 0
    num_tries.extend([1] * 9)
    with pytest.raises(openai.RateLimitError) as busy:
        client.with_options(max_retries=0).completions.create(model="policy", prompt="x")
    assert busy.value.code == "overloaded"


def test_a_client_that_hangs_up_frees_its_slots(url, engine, monkeypatch):
    step = type(engine)._step
    monkeypatch.setattr(type(engine), "_step", lambda self, live: time.sleep(0.2) or step(self, live))
    ask = {"prompt": "2 + 3", "n": 4, "stream": True}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for body in (ask, ask | {"stream": False}):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=0.6)
        began = time.monotonic()
        while engine.num_running or engine.num_waiting:
            assert time.monotonic() - began < 1.0, "8 steps would take longer"
            time.sleep(0.01)


def test_curl_as_the_banner_says_it(url):
    head = ["curl", "-sS", "-i", "--max-time", "30", "-H", f"Authorization: Bearer {TOKEN}"]
    json_type = ["-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*head, *json_type, f"{url}/v1/completions", "-d", '{"prompt": "What is 2 + 3?"}'],
        capture_output=True,
        text=True,
        check=True,
    )
    headers, _, body = done.stdout.partition("\n\n") if "\r" not in done.stdout else done.stdout.partition("\r\n\r\n")
    assert "200" in headers.splitlines()[0]
    assert "x-policy-version: 1" in headers
    assert json.loads(body)["choices"]
    streamed = subprocess.run(
        [*head, *json_type, "-N", f"{url}/v1/completions", "-d", '{"prompt": "2", "stream": true}'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "content-type: text/event-stream" in streamed.stdout
    assert streamed.stdout.rstrip().endswith("data: [DONE]")
    refused = subprocess.run(
        ["curl", "-sS", "--max-time", "30", f"{url}/v1/models"], capture_output=True, text=True, check=True
    )
    assert json.loads(refused.stdout)["error"]["code"] == "invalid_api_key"
