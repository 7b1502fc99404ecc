"""Load generators of the service (closed and open loop), and verification of the answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.service.deployment import KEY, NUM_WEIGHTS, Policies
from deploy.requests.body import ChatRequest, CompletionRequest
from deploy.service.source import Source
from rollout.request import Request

_TIMEOUT_S = 120.0
_MOST_UNDER_WAY = 200
"""Maximum concurrent requests of an open loop. The service refuses more than 256, which a slow machine can reach."""
_PROMPTS = ("What is 2 + 3?", "What is 1 + 2?", "The sum is", "3 + 4 + 5")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A request to the service."""

    body: dict[str, Any]
    is_chat: bool = False
    is_streamed: bool = False

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def sent(self) -> dict[str, Any]:
        """JSON body of the request."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return self.body | (streamed if self.is_streamed else {})


@dataclass(slots=True)
class Answer:
    """Outcome of a request."""

    ask: Ask
    began_s: float
    """When it was sent, or was due. By `time.perf_counter`, as the next two."""
    first_s: float = 0.0
    """When the first committed block of a stream arrived."""
    ended_s: float = 0.0
    status: int = 0
    versions: set[int] = field(default_factory=set)
    """Policy versions that the answer names."""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    """Completion tokens from the answer's usage field."""
    failure: str | None = None
    """Reason of a failure."""
    truncation: str | None = None
    """Missing part of a truncated answer."""

    @property
    def total_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended_s - self.began_s

    @property
    def to_first_s(self) -> float:
        """Seconds to the first committed block."""
        return self.first_s - self.began_s


def mixed_asks(policies: Policies, num: int, seed: int) -> list[Ask]:
    """Make a mix of chats and completions, streamed or not, at temperatures 0 and 0.9. Half may end early."""
    draw, shape = random.Random(seed), policies.shape
    asks = []
    for index in range(num):
        constraints = {"forbidden_ids": [policies.eos_id]} if index % 2 else {}
        prompt = draw.choice(_PROMPTS)
        body: dict[str, Any] = {
            "seed": draw.randrange(10**6),
            "temperature": (0.0, 0.9)[index // 2 % 2],
            "diffusion": {
                "gen_length": shape.gen_length,
                "block_length": shape.block_length,
                "steps": shape.steps,
                "return_step_map": True,
                "constraints": constraints,
            },
        }
        is_chat = index // 4 % 2 == 1
        said = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        asks.append(Ask(body=body | said, is_chat=is_chat, is_streamed=index // 8 % 2 == 1))
    return asks


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Make a function that returns True for the next `seconds`."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


class Client:
    """HTTP client of the service."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=_TIMEOUT_S)

    async def ask(self, ask: Ask, due_s: float | None = None) -> Answer:
        """Send a request. Returns an `Answer` also if it fails."""
        answer = Answer(ask=ask, began_s=time.perf_counter() if due_s is None else due_s)
        try:
            async with self.http.stream("POST", ask.path, json=ask.sent) as response:
                answer.status = response.status_code
                if response.status_code != 200:
                    answer.failure = f"{response.status_code} {(await response.aread()).decode(errors='replace')[:300]}"
                elif ask.is_streamed:
                    await _read_stream(answer, response)
                else:
                    _read_body(answer, json.loads(await response.aread()))
                if "x-policy-version" in response.headers:
                    answer.versions.add(int(response.headers["x-policy-version"]))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            answer.failure = f"{_why(error)} (status {answer.status}, {time.perf_counter() - answer.began_s:.1f} s)"
        answer.ended_s = time.perf_counter()
        return answer

    async def num_engines(self) -> int:
        """Count the engines that answer."""
        response = await self.http.get("/health/ready")
        return int(response.json()["num_engines"]) if response.status_code == 200 else 0

    async def aclose(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def closed_loop(self, asks: Sequence[Ask], num_clients: int, goes_on: Callable[[], bool]) -> list[Answer]:
        """Run `num_clients` clients, each of which sends its next request after an answer."""
        answers: list[Answer] = []

        async def client(index: int) -> None:
            draw = random.Random(index)
            while goes_on():
                answers.append(await self.ask(draw.choice(asks)))

        await asyncio.gather(*(client(index) for index in range(num_clients)))
        return answers

    async def open_loop(self, asks: Sequence[Ask], rate: float, goes_on: Callable[[], bool]) -> list[Answer]:
        """Send `rate` requests per second, independently of the answers. Latency counts from a request's due time.

        At most `_MOST_UNDER_WAY` requests are in flight. The wait for a free place counts as latency.
        """
        due_s, tasks, draw = time.perf_counter(), [], random.Random(0)
        under_way: set[asyncio.Task[Answer]] = set()
        while goes_on():
            task = asyncio.create_task(self.ask(draw.choice(asks), due_s))
            tasks.append(task)
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            due_s += 1 / rate
            if len(under_way) >= _MOST_UNDER_WAY:
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return list(await asyncio.gather(*tasks))


def _why(error: BaseException) -> str:
    """Describe an error and its causes: httpx's own message is empty for connections that were reset or closed."""
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    cause = error.__cause__ or error.__context__
    return said if cause is None else f"{said} <- {_why(cause)}"


def _read_body(answer: Answer, body: dict[str, Any]) -> None:
    choice = body["choices"][0]
    answer.versions.add(body["policy_version"])
    answer.text = choice["message"]["content"] if answer.ask.is_chat else choice["text"]
    _read_end(answer, choice, body.get("usage"))


async def _read_stream(answer: Answer, response: httpx.Response) -> None:
    choice, usage, is_done = None, None, False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        is_done = data == "[DONE]"
        if is_done:
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            answer.failure = data[:300]
            return
        answer.versions.add(chunk["policy_version"])
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            new = part["delta"].get("content", "") if answer.ask.is_chat else part["text"]
            if (new or part["finish_reason"]) and not answer.first_s:
                answer.first_s = time.perf_counter()
            answer.text += new
            choice = part if part["finish_reason"] else choice
    if not is_done:
        answer.truncation = "it has no [DONE]"
    elif choice is None:
        answer.truncation = "it has no finish_reason"
    else:
        _read_end(answer, choice, usage)


def _read_end(answer: Answer, choice: dict[str, Any], usage: dict[str, Any] | None) -> None:
    answer.token_ids = choice.get("diffusion", {}).get("token_ids", [])
    if usage is None:
        answer.truncation = "it has no usage"
        return
    answer.num_tokens = usage["completion_tokens"]
    if choice["finish_reason"] not in ("stop", "length"):
        answer.truncation = f"its finish_reason is {choice['finish_reason']}"
    elif "return_step_map" in answer.ask.body["diffusion"] and answer.num_tokens != len(answer.token_ids):
        answer.truncation = f"its usage has {answer.num_tokens} tokens, it has {len(answer.token_ids)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Defective answers, by kind of defect."""

    failed: list[str]
    truncated: list[str]
    mixed: list[str]
    """Answers that name several versions, or differ from the sole version's sampler run alone."""

    @property
    def is_good(self) -> bool:
        """Whether there are no defects."""
        return not (self.failed or self.truncated or self.mixed)


class Judge:
    """Compares answers with the output of each version's sampler run alone."""

    def __init__(self, policies: Policies) -> None:
        source = Source(directory=str(policies.directory), is_run=True, registry_url=None)
        self._policies, self._codec = policies, source.codec()
        self._planner = source.planner(self._codec)
        self._expected: dict[tuple[int, int], list[int]] = {}

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """Check every answer."""
        failed = [answer.failure for answer in answers if answer.failure]
        whole = [answer for answer in answers if not answer.failure]
        truncated = [answer.truncation for answer in whole if answer.truncation]
        mixed = [why for answer in whole if not answer.truncation and (why := self._why_mixed(answer))]
        return Verdict(failed=failed, truncated=truncated, mixed=mixed)

    def _why_mixed(self, answer: Answer) -> str | None:
        if len(answer.versions) != 1:
            return f"it names the versions {sorted(answer.versions)}"
        (version,) = answer.versions
        if answer.token_ids != self.expected(answer.ask, version):
            others = [v for v in range(NUM_WEIGHTS) if answer.token_ids == self.expected(answer.ask, v)]
            return f"its tokens are not those of version {version}, but of weights {others or 'of none'}"
        if answer.text != self.text(answer.token_ids):
            return f"its text is not that of its tokens: {answer.text!r}"
        return None

    def expected(self, ask: Ask, version: int) -> list[int]:
        """Sample the expected tokens with a version's sampler in this process."""
        key = id(ask), version % NUM_WEIGHTS
        if key not in self._expected:
            completion = self._policies.sampler(version).generate(self.requests(ask))[0]
            self._expected[key] = completion.token_ids[: completion.num_tokens].tolist()
        return self._expected[key]

    def text(self, token_ids: list[int]) -> str:
        """Decode tokens to text."""
        return self._codec.decode(token_ids)

    def requests(self, ask: Ask) -> tuple[Request, ...]:
        """Build the sampler requests that the service makes for `ask`."""
        kind = ChatRequest if ask.is_chat else CompletionRequest
        return self._planner.plan(kind(**ask.body)).masked_requests
