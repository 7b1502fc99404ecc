"""LLM judge: a reward term whose value is a language model's verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from rewards.sample import Sample
from rewards.terms.endpoint import Endpoint, RequestRejectedError, map_concurrently
from rewards.terms.judge.cache import open_cache
from rewards.terms.judge.config import JudgeConfig
from rewards.terms.judge.limits import Costs, RateLimit
from rewards.terms.judge.prompt import Message, judge_messages, retry_messages
from rewards.terms.term import NoValue, Value, secret_of

_DEFAULTS = {"temperature": 0, "max_tokens": 64}
_LONGEST_SHOWN = 100


class Judge:
    """The term of a `JudgeConfig`. Equal requests of a call are sent once, and readable answers are cached."""

    def __init__(self, config: JudgeConfig) -> None:
        """Create the client and open the cache. Raises ValueError if the key's variable is not set or the cache cannot
        be opened."""
        self._config = config
        self._cache = open_cache(config.cache_path, config.cache_redis_env)
        self._costs = Costs()
        self._rate = RateLimit(config.requests_per_minute)
        self._endpoint = Endpoint(
            url=f"{config.base_url.rstrip('/')}/chat/completions",
            token=secret_of(config.api_key_env),
            timeout_s=config.timeout_s,
            num_tries=config.num_tries,
            max_bytes=config.max_response_bytes,
            before_try=self._before_try,
        )
        self._is_constrained = config.constraint != "none"

    def values(self, samples: Sequence[Sample]) -> list[Value]:
        """Return the value of the judge's verdict on each sample; `NoValue` if no answer could be read.

        Raises RewardUnavailableError if the server or the cache does not answer.
        """
        asked = [self._messages(sample) for sample in samples]
        keys = [self._key(messages) for messages in asked]
        different = dict(zip(keys, asked, strict=True))
        verdicts = map_concurrently(
            lambda asked: self._verdict(*asked), different.items(), self._config.max_concurrency
        )
        by_key = dict(zip(different, verdicts, strict=True))
        self._costs.add(num_cached=len(keys) - len(different))
        return [by_key[key] for key in keys]

    def take_costs(self) -> Mapping[str, float]:
        """Return what was spent since the last call.

        `num_requests` (including retries), `prompt_tokens`, `completion_tokens`, and `num_cached`, the samples that
        cost no request.
        """
        return self._costs.take()

    def _before_try(self) -> None:
        self._rate.wait()
        self._costs.add(num_requests=1)

    def _messages(self, sample: Sample) -> list[Message]:
        config = self._config
        return judge_messages(
            sample,
            criteria=config.criteria,
            verdict=config.verdict,
            max_chars=config.max_completion_chars,
            with_answer=config.with_answer,
        )

    def _key(self, messages: Sequence[Message]) -> str:
        """Return the hash of everything that an answer depends on."""
        request = self._request(messages) | self._constraint()
        return sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def _verdict(self, key: str, messages: list[Message]) -> Value:
        read = self._config.verdict.read
        if (cached := self._cache.get(key)) is not None and (value := read(cached)) is not None:
            self._costs.add(num_cached=1)
            return value
        try:
            for question in (messages, retry_messages(messages, self._config.verdict)):
                answer = self._answer(question)
                if (value := read(answer)) is not None:
                    self._cache.put(key, answer)
                    return value
        except RequestRejectedError as error:
            return NoValue(detail=f"the judge {self._config.model} has no answer: {error}")
        shown = repr(answer[:_LONGEST_SHOWN])
        return NoValue(detail=f"the judge {self._config.model} gave no verdict when asked twice, but {shown}")

    def _answer(self, messages: Sequence[Message]) -> str:
        """Return the model's reply. Raises RequestRejectedError if the server's response is not a chat completion."""
        request = self._request(messages)
        if self._is_constrained:
            try:
                return self._read(self._endpoint.post_json(request | self._constraint()))
            except RequestRejectedError:
                answer = self._read(self._endpoint.post_json(request))
                # The constraint was the cause: the same request without it succeeded.
                self._is_constrained = False
                return answer
        return self._read(self._endpoint.post_json(request))

    def _request(self, messages: Sequence[Message]) -> dict[str, Any]:
        parameters = _DEFAULTS | self._config.parameters
        given = {name: value for name, value in parameters.items() if value is not None}
        return {"model": self._config.model, "messages": list(messages)} | given

    def _constraint(self) -> dict[str, Any]:
        verdict = self._config.verdict
        match self._config.constraint:
            case "json_schema":
                schema = {"name": "verdict", "strict": True, "schema": verdict.json_schema()}
                return {"response_format": {"type": "json_schema", "json_schema": schema}}
            case "vllm_choice":
                return {"structured_outputs": {"choice": list(verdict.words())}}
            case "none":
                return {}

    def _read(self, body: bytes) -> str:
        """Return the text of a chat completion, and count its tokens."""
        try:
            reply = json.loads(body)
            text = reply["choices"][0]["message"]["content"]
            usage = reply.get("usage") or {}
            counts = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RequestRejectedError(
                f"its server answered with no chat completion ({type(error).__name__})"
            ) from error
        self._costs.add(**counts)
        # A reply without content (a refusal, a tool call) counts as an answer that cannot be read.
        return text if isinstance(text, str) else ""
