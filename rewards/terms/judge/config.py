"""Configuration of the LLM judge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_validator, model_validator

from rewards.terms.endpoint import RemoteTermConfig, checked_url
from rewards.terms.judge.cache import open_cache
from rewards.terms.judge.server import VllmConfig
from rewards.terms.judge.verdict import ChoiceVerdict, VerdictFormat
from rewards.terms.term import EnvironmentName, secret_of

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class JudgeConfig(RemoteTermConfig):
    """A language model behind any OpenAI-compatible server, which judges each sample."""

    kind: Literal["judge"] = "judge"
    """Selects this term."""
    base_url: str
    """URL of the server, with its API version: `http://127.0.0.1:8001/v1`. Redirects are not followed and no proxy is
    used."""
    model: str
    """The model's name on the server."""
    api_key_env: EnvironmentName | None = None
    """Environment variable with the API key, never the key itself. On a cluster it must be set on every machine."""
    criteria: Annotated[str, Field(min_length=1)]
    """What to judge; becomes part of the system prompt."""
    verdict: VerdictFormat = ChoiceVerdict()
    """The set of possible verdicts."""
    with_answer: bool = True
    """Whether the judge sees the reference answer."""
    constraint: Literal["json_schema", "vllm_choice", "none"] = "json_schema"
    """How the server restricts the output to the possible verdicts: by `response_format`, by vLLM's
    `structured_outputs`, or by the prompt alone. If a server refuses it, requests are sent without it."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the request, or other values for `temperature` (0) and `max_tokens` (64). `null` removes a
    key."""
    max_completion_chars: Annotated[int, Field(ge=2)] = 8000
    """Longest completion that is shown in full, in characters. A longer one loses its middle."""
    requests_per_minute: PositiveFloat | None = None
    """Maximum requests of a grader per minute, including retries. A run has `grading.num_graders` graders."""
    cache_path: Path | None = None
    """SQLite file that keeps the verdicts, also for later runs; on a local disk of the machine that grades. Without a
    cache each grader keeps its newest ten thousand."""
    cache_redis_env: EnvironmentName | None = None
    """Environment variable with the URL of a Redis server that keeps the verdicts instead."""
    vllm: VllmConfig | None = None
    """Makes d1 start the server with vLLM on this machine, for the duration of the run."""

    _base_url = field_validator("base_url")(checked_url)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cache_path is not None and self.cache_redis_env is not None:
            raise ValueError("cache_path and cache_redis_env are two caches; leave one out")
        parts = urlsplit(self.base_url)
        is_local = parts.scheme == "http" and parts.hostname in _LOOPBACK and parts.port and parts.path == "/v1"
        if self.vllm is not None and not is_local:
            raise ValueError(
                f"base_url is {self.base_url}, and a server that d1 starts listens on this machine alone; "
                "take http://127.0.0.1:PORT/v1"
            )
        return self

    def check(self) -> None:
        """Raise ValueError if the key's variable is not set, the cache cannot be opened, or vLLM cannot be started
        here."""
        secret_of(self.api_key_env)
        open_cache(self.cache_path, self.cache_redis_env)
        if self.vllm is not None:
            self.vllm.check(self.base_url)

    def resolved(self) -> Self:
        """Return a copy with an absolute path of the cache."""
        return self.model_copy(update={"cache_path": self.cache_path and self.cache_path.resolve()})
