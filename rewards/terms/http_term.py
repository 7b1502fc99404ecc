"""A term that an HTTP endpoint gives: samples as JSON, numbers back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rewards.sample import Sample
from rewards.terms.endpoint import AskingConfig, Endpoint, RefusedError, ask_all, checked_url
from rewards.terms.term import EnvironmentName, NoValue, Value, as_value, secret_of


class HttpConfig(AskingConfig):
    """An HTTP endpoint. It alone is asked: no redirect is followed and no proxy used."""

    kind: Literal["http"] = "http"
    """Selects this term."""
    url: str
    """Where samples are posted to: `http://` or `https://`, host, port and path."""
    token_env: EnvironmentName | None = None
    """Environment variable whose value is sent as `Authorization: Bearer`; on a cluster, of every machine."""
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    """Most samples of a request."""

    _url = field_validator("url")(checked_url)

    def check(self) -> None:
        """Raise ValueError when the token's variable is not set."""
        secret_of(self.token_env)


class HttpTerm:
    """The endpoint at work."""

    def __init__(self, config: HttpConfig) -> None:
        """Raises ValueError when the token's variable is not set."""
        self._config = config
        self._endpoint = Endpoint(
            url=config.url,
            token=secret_of(config.token_env),
            timeout_s=config.timeout_s,
            num_tries=config.num_tries,
            max_bytes=config.max_response_bytes,
            before_try=lambda: None,
        )

    def values(self, samples: Sequence[Sample]) -> list[Value]:
        """What the endpoint answers for each sample; `NoValue` where its answer is not as documented.

        Raises RewardUnavailableError when it does not answer, or would refuse every request.
        """
        size = self._config.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        return list(chain.from_iterable(ask_all(self._batch, batches, self._config.max_concurrency)))

    def take_costs(self) -> Mapping[str, float]:
        """None."""
        return {}

    def _batch(self, samples: Sequence[Sample]) -> list[Value]:
        try:
            body = self._endpoint.ask({"samples": [sample.facts() for sample in samples]})
        except RefusedError as error:
            return [NoValue(detail=str(error))] * len(samples)
        return _values_of(body, len(samples), self._config.url)


def _values_of(body: bytes, count: int, url: str) -> list[Value]:
    """The values of a body `{"values": [...]}` with a number, or null for none, for each sample."""
    try:
        values = json.loads(body)["values"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(values, list) and len(values) == count:
            return [as_value(value, url) for value in values]
        problem = f"values is a list of {len(values)}" if isinstance(values, list) else "values is no list"
    return [NoValue(detail=f'{url} should answer {{"values": [...]}} with {count} values; {problem[:200]}')] * count
