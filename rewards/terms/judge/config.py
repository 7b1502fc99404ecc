"""How a judge is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_validator, model_validator

from rewards.terms.endpoint import AskingConfig, checked_url
from rewards.terms.judge.cache import open_cache
from rewards.terms.judge.server import VllmConfig
from rewards.terms.judge.verdict import ChoiceVerdict, Verdict
from rewards.terms.term import EnvironmentName, secret_of

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class JudgeConfig(AskingConfig):
    """A language model behind any OpenAI-compatible server, which is asked about each sample."""

    kind: Literal["judge"] = "judge"
    """Selects this term."""
    base_url: str
    """Of the server, with its version: `http://127.0.0.1:8001/v1`. It alone is asked: no redirect is followed and no
    proxy used."""
    model: str
    """The model's name there."""
    api_key_env: EnvironmentName | None = None
    """Environment variable with the key, never the key itself; on a cluster, of every machine."""
    criteria: Annotated[str, Field(min_length=1)]
    """What to judge, in the words of the system prompt."""
    verdict: Verdict = ChoiceVerdict()
    """What the judge may answer."""
    with_answer: bool = True
    """Whether the judge is told the reference answer."""
    constraint: Literal["json_schema", "vllm_choice", "none"] = "json_schema"
    """How the server is told which answers there are: by `response_format`, by vLLM's `structured_outputs`, or in the
    prompt alone. A server that refuses it is asked without."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """More keys of the request, or other values for `temperature` (0) and `max_tokens` (64); none takes one out."""
    max_completion_chars: Annotated[int, Field(ge=2)] = 8000
    """Longest completion that is shown whole, in characters; of a longer one the middle is left out."""
    requests_per_minute: PositiveFloat | None = None
    """Most requests of a grader in a minute, retries among them; a run has `grading.num_graders` graders."""
    cache_path: Path | None = None
    """SQLite file that keeps the verdicts, for later runs too; on a disk of the machine that grades. Without a cache
    each grader remembers its newest ten thousand."""
    cache_redis_env: EnvironmentName | None = None
    """Environment variable with the URL of a Redis that keeps them instead."""
    vllm: VllmConfig | None = None
    """Have d1 start the server with vLLM on this machine, for as long as the run lasts."""

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
        """Raise ValueError when the key's variable is not set, the cache cannot be opened or vLLM is not here."""
        secret_of(self.api_key_env)
        open_cache(self.cache_path, self.cache_redis_env)
        if self.vllm is not None:
            self.vllm.check(self.base_url)

    def resolved(self) -> Self:
        """With an absolute path of the cache."""
        return self.model_copy(update={"cache_path": self.cache_path and self.cache_path.resolve()})
