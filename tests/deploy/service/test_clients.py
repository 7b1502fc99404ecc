"""Third-party clients against the application on a socket."""

import asyncio
import http.client
import json
import subprocess
import threading
import time
from typing import Literal
from urllib.parse import urlsplit

import openai
import pydantic
import pytest

from deploy.service.api.app import create_app
from tests.deploy.service.asking import wait_until

TOKEN = "a-token-of-this-test"
MESSAGES = [{"role": "user", "content": "2 + 3"}]


@pytest.fixture
def url(app, listen):
    return listen(app, TOKEN)


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=30) as client:
        yield client


def test_openai_python_completes_and_chats(client):
    answer = client.chat.completions.create(model="policy", messages=MESSAGES, seed=1, n=2, temperature=1)
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    text = client.completions.create(model="policy", prompt="2 + 3", seed=1, max_tokens=5)
    assert text.usage.completion_tokens == 5
    assert text.model_extra["policy_version"] == 1
    raw = client.chat.completions.with_raw_response.create(model="policy", messages=MESSAGES)
    assert raw.headers["x-policy-version"] == "1"
    assert {model.id for model in client.models.list()} == {"policy", "base", "last", "tiny", "policy@v000001"}
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


class Sum(pydantic.BaseModel):
    """Type into which openai-python parses answers. Its schema refers to another."""

    class Operand(pydantic.BaseModel):
        value: int
        sign: Literal["+", "-"]

    operands: list[Operand]
    is_negative: bool


def test_openai_python_parses_answers_into_pydantic_models(client):
    extra = {"seed": 1, "diffusion": {"gen_length": 48, "steps": 48}}
    chat = client.chat.completions.parse(model="policy", messages=MESSAGES, response_format=Sum, extra_body=extra)
    assert isinstance(chat.choices[0].message.parsed, Sum)


def test_openai_python_sends_concurrent_async_requests(url):
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
        client.completions.create(model="policy", prompt="x", echo=True)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "echo")
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def test_openai_python_retries_after_retry_after(client, engine, full_until):
    tries = full_until(3)
    began = time.monotonic()
    assert client.completions.create(model="policy", prompt="x").choices
    assert len(tries) == 3
    assert time.monotonic() - began > 1.8, "Retry-After says a second"
    engine._max_pending = 0
    with pytest.raises(openai.RateLimitError) as busy:
        client.with_options(max_retries=0).completions.create(model="policy", prompt="x")
    assert busy.value.code == "overloaded"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_async_openai_python_retries_while_a_service_drains(url, app, monkeypatch, is_streamed):
    waited = []

    async def wait(seconds):
        waited.append(seconds)
        app.state.inference.is_draining = len(waited) < 2

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=30) as client:
            answer = await client.completions.create(model="policy", prompt="2 + 3", seed=1, stream=is_streamed)
            return "".join([chunk.choices[0].text async for chunk in answer]) if is_streamed else answer.choices[0].text

    text = asyncio.run(ask())
    app.state.inference.is_draining = True
    monkeypatch.setattr("openai._base_client.anyio.sleep", wait)
    assert asyncio.run(ask()) == text
    assert waited == [5.0, 5.0], "Retry-After says five seconds"


def test_openai_python_gives_up_on_a_draining_service_with_its_own_error(client, app):
    app.state.inference.is_draining = True
    with pytest.raises(openai.InternalServerError) as unavailable:
        client.with_options(max_retries=0).chat.completions.create(model="policy", messages=MESSAGES)
    assert (unavailable.value.status_code, unavailable.value.code) == (503, "unavailable")
    assert unavailable.value.response.headers["retry-after"] == "5"


def test_openai_python_raises_when_a_stream_breaks(listen, mortal_service):
    url = listen(create_app(mortal_service), TOKEN)
    chunks = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=30) as client:
        stream = client.chat.completions.create(model="policy", messages=MESSAGES, stream=True, seed=1, temperature=1)
        with pytest.raises(openai.APIError) as broken:
            chunks.extend(stream)
    assert broken.value.code == "engine_unavailable"
    assert any(chunk.choices[0].delta.content for chunk in chunks), "what came before stays"


# Without a stream Ray Serve's proxy cancels the request: tests/deploy/service/on_ray has clients that hang up.
def test_a_client_that_hangs_up_frees_its_slots(url, engine, monkeypatch):
    step, cancel, taken, hung_up = type(engine)._step, type(engine).cancel, [], threading.Event()

    def slow(self, live):
        taken.append(live)
        # Wait, however late the service notices that its client hung up.
        if len(taken) > 3:
            hung_up.wait(60)
        step(self, live)

    def heard(self, ticket):
        cancel(self, ticket)
        hung_up.set()

    monkeypatch.setattr(type(engine), "_step", slow)
    monkeypatch.setattr(type(engine), "cancel", heard)
    ask = {"prompt": "2 + 3", "n": 4, "stream": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(ask), headers)
    wait_until(lambda: taken, "a step")
    connection.close()
    wait_until(lambda: not (engine.num_running or engine.num_waiting), "free slots")
    assert 0 < len(taken) < 8, "8 are all"


def test_the_curl_line_of_the_banner_works(url):
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
