"""Reward term computed by an HTTP endpoint: it receives samples as JSON and returns numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rewards.sample import Sample
from rewards.terms.endpoint import Endpoint, RemoteTermConfig, RequestRejectedError, checked_url, map_concurrently
from rewards.terms.term import EnvironmentName, NoValue, Value, as_value, secret_of


class HttpConfig(RemoteTermConfig):
    """An HTTP endpoint. Redirects are not followed and no proxy is used."""

    takes_arguments: ClassVar[bool] = True

    kind: Literal["http"] = "http"
    """Selects this term."""
    url: str
    """URL that samples are posted to: `http://` or `https://`, host, port and path."""
    token_env: EnvironmentName | None = None
    """Environment variable whose value is sent as `Authorization: Bearer`. On a cluster it must be set on every
    machine."""
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    """Maximum number of samples in a request."""

    _url = field_validator("url")(checked_url)

    def check(self) -> None:
        """Raise ValueError if the token's variable is not set."""
        secret_of(self.token_env)


class HttpTerm:
    """The term of an `HttpConfig`."""

    def __init__(self, config: HttpConfig) -> None:
        """Create the client. Raises ValueError if the token's variable is not set."""
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
        """Return the endpoint's value for each sample; `NoValue` if its response is not as documented.

        Raises RewardUnavailableError if it does not answer, or would refuse every request.
        """
        size = self._config.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        return list(chain.from_iterable(map_concurrently(self._batch, batches, self._config.max_concurrency)))

    def take_costs(self) -> Mapping[str, float]:
        """Return no costs."""
        return {}

    def _batch(self, samples: Sequence[Sample]) -> list[Value]:
        try:
            body = self._endpoint.post_json({"samples": [sample.reward_arguments() for sample in samples]})
        except RequestRejectedError as error:
            return [NoValue(detail=str(error))] * len(samples)
        return _values_of(body, samples, self._config.url)


def _values_of(body: bytes, samples: Sequence[Sample], url: str) -> list[Value]:
    """Parse a body `{"values": [...]}`: for each sample a number, a list with one for each block, or null for none."""
    count = len(samples)
    try:
        values = json.loads(body)["values"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(values, list) and len(values) == count:
            return [as_value(value, url, len(of.blocks)) for value, of in zip(values, samples, strict=True)]
        problem = f"values is a list of {len(values)}" if isinstance(values, list) else "values is no list"
    return [NoValue(detail=f'{url} should answer {{"values": [...]}} with {count} values; {problem[:200]}')] * count
