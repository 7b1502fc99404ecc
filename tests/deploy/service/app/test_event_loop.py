"""Event loop latency: no request body makes the loop's thread compute for long at a time."""

import asyncio
import json
import time

import httpx
import pytest

from deploy.service.api.app import guarded
from deploy.service.gateway.access import MAX_CONTAINERS
from deploy.service.gateway.keys import ApiKeys, RateLimits
from tests.deploy.service.app.asking import BEARER, TOKEN

# 25 ms on a quiet machine. Each of these took 300 ms or more before it was fixed, and a busy machine is slower.
MOST_S = 0.15
TEXT = "1 2 3 " * 43_000
NUM = 60_000


def _longest(app, path, content):
    """Return the status, the message if it is an error, and the longest time between two turns of the loop.

    The time is CPU seconds of the loop's thread, to which other processes do not add.
    """

    async def ask():
        gaps = []

        async def tick():
            last = time.thread_time()
            while True:
                await asyncio.sleep(0.001)
                now = time.thread_time()
                gaps.append(now - last)
                last = now

        gate = guarded(app, ApiKeys.of(TOKEN, "test"), RateLimits("1000000/second"))
        headers = BEARER | {"content-type": "application/json"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(gate), base_url="http://x", headers=headers
        ) as client:
            await client.post("/tokenize", content='{"prompt": "1"}')
            ticking = asyncio.create_task(tick())
            await asyncio.sleep(0.01)
            response = await client.post(path, content=content, timeout=60)
            await asyncio.sleep(0.01)
            ticking.cancel()
        return response.status_code, response.json().get("error", {}).get("message", ""), max(gaps)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {"prompt": TEXT}, 200, ""),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}, 200, ""),
        ("/v1/completions", {"prompt": TEXT}, 400, "this policy reads at most"),
        ("/v1/completions", {"prompt": "x", **{f"k{number}": 1 for number in range(NUM)}}, 400, "has 60001 fields"),
        ("/v1/completions", {"prompt": "x", "diffusion": {f"k{n}": 1 for n in range(NUM)}}, 400, "has 60000 fields"),
        ("/v1/completions", {"prompt": [[1]] * 200_000}, 400, "has 200002 lists and objects"),
        ("/v1/chat/completions", {"messages": [[[[]]]] * 100_000}, 400, "has 300002 lists and objects"),
        ("/detokenize", {"tokens": [7] * 300_000}, 400, "at most 65536 items"),
    ],
)
def test_no_body_blocks_the_event_loop(app, path, body, status, words):
    found, message, longest_s = _longest(app, path, json.dumps(body))
    assert (found, words in message) == (status, True), message
    assert longest_s < MOST_S


def test_brackets_inside_strings_are_not_counted(app):
    text = '[{"' * (MAX_CONTAINERS + 1)
    status, message, _ = _longest(app, "/tokenize", json.dumps({"prompt": text}))
    assert (status, message) == (200, "")
    status, message, _ = _longest(app, "/tokenize", b'{"prompt":' + b"[" * (MAX_CONTAINERS + 1))
    assert "has 32770 lists and objects; it should have at most 32768" in message
