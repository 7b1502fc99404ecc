"""The registry: which policy versions a run has announced, in order, on a Redis stream.

A stream and not pub/sub: whoever was away reads on where it stopped and misses nothing. The registry is never the only
copy of anything: weights lie in the weight store and in checkpoints, scores in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

_MAX_ENTRIES = 1000
_MAX_BLOCK_MS = 2000
# Longer than a blocking read, or redis-py ends the read as a timeout.
_SOCKET_TIMEOUT_S = 3.0
_FIELD = b"policy_version"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """What is known of one published set of weights."""

    version: int
    """The policy version: +1 for each published set of weights, 0 is what training started from."""
    round: int
    """The round that published it; 0 before the first."""
    phase: str
    """The stage of the run that made it: untrained, sft, rl or control."""
    num_correct: int | None
    """Held-out problems that it solves; None while it has not been evaluated."""
    num_problems: int | None
    """Held-out problems that it was asked; None while it has not been evaluated."""
    checkpoint: str | None
    """Directory that holds these very weights; None when none was written."""
    weight_store: str | None
    """Ray name of the weight store that holds or held them; None when they were never published there."""
    manifest_digest: str | None
    """Checksum of the manifest of its tensors; None when the publisher made none."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The policy version of a JSON object. Raises ValueError when it is not one."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise ValueError("a policy version needs exactly the fields " + ", ".join(f.name for f in fields(cls)))
        for name, value in values.items():
            if not _is_of_type(name, value):
                raise ValueError(f"a policy version's {name} cannot be {value!r}")
        return cls(**values)

    def has_same_weights(self, other: PolicyVersion) -> bool:
        """Whether both name the same weights. A run resumed from a checkpoint announces its versions a second time."""
        digests = {self.manifest_digest, other.manifest_digest} - {None}
        return self.version == other.version and len(digests) < 2


class MalformedEntryError(ValueError):
    """The next entry of the stream is no policy version; a reader goes on after `entry_id`."""

    def __init__(self, entry_id: str, reason: str) -> None:
        super().__init__(f"entry {entry_id} of the registry is no policy version: {reason}")
        self.entry_id = entry_id


class Registry:
    """One run's announcements. Every call ends within seconds; ConnectionError says in a sentence why it could not."""

    def __init__(self, url: str, run: str) -> None:
        """Connects at the first call; `url` is `redis://[:password@]host:port`."""
        parts = urlsplit(url)
        # Without the password: this is what error messages show.
        self._address = f"{parts.hostname}:{parts.port}"
        self._stream = f"d1:{run}:versions"
        # RESP 2: replies have one shape for every server.
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            # Enough for a connection that broke while idle; by default redis-py sleeps for seconds.
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), retries=2),
            protocol=2,
        )

    def ping(self) -> None:
        """Raise ConnectionError, with a sentence, unless the registry answers."""
        with self._explained():
            self._redis.ping()

    def announce(self, policy: PolicyVersion) -> None:
        """Make `policy` the version that is served. Announced again, it only brings its new facts."""
        with self._explained():
            self._redis.xadd(self._stream, {_FIELD: policy.to_json()}, maxlen=_MAX_ENTRIES)

    def score(self, version: int, num_correct: int, num_problems: int) -> bool:
        """Announce the held-out score of the latest version.

        False, and nothing announced, when another version is the latest by now: announcing again would put the older
        weights back into service.
        """
        latest = self.latest()
        if latest is None or latest.version != version:
            return False
        self.announce(replace(latest, num_correct=num_correct, num_problems=num_problems))
        return True

    def latest(self) -> PolicyVersion | None:
        """The version announced last; None when there is none. Raises MalformedEntryError."""
        with self._explained():
            entries: Any = self._redis.xrevrange(self._stream, count=1)
        return _parse(*entries[0])[1] if entries else None

    def follow(self, last_id: str, block_ms: int) -> list[tuple[str, PolicyVersion]]:
        """The announcements after entry `last_id` ("0": from the first that is kept), oldest first.

        Waits up to `block_ms` (at most 2000; 0 does not wait) for one to come. Raises MalformedEntryError when the
        very next entry is none; entries before such a one are returned first.
        """
        block = min(block_ms, _MAX_BLOCK_MS) or None
        with self._explained():
            reply: Any = self._redis.xread({self._stream: last_id}, block=block)
        parsed: list[tuple[str, PolicyVersion]] = []
        for entry_id, values in reply[0][1] if reply else []:
            try:
                parsed.append(_parse(entry_id, values))
            except MalformedEntryError:
                if not parsed:
                    raise
                break
        return parsed

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except redis.AuthenticationError as error:
            raise ConnectionError(f"the registry at {self._address} refused the password") from error
        except redis.RedisError as error:
            raise ConnectionError(f"the registry at {self._address} cannot be used: {error}") from error


def _parse(entry_id: bytes, values: dict[bytes, bytes]) -> tuple[str, PolicyVersion]:
    name = entry_id.decode()
    try:
        return name, PolicyVersion.from_json(values.get(_FIELD, b"null"))
    except ValueError as error:
        raise MalformedEntryError(name, str(error)) from error


def _is_of_type(name: str, value: object) -> bool:
    if name in ("num_correct", "num_problems"):
        return value is None or (type(value) is int and value >= 0)
    if name in ("version", "round"):
        return type(value) is int and value >= 0
    return isinstance(value, str) or (value is None and name != "phase")
