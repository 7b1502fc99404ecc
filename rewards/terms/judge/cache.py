"""Cache of the judge's answers by the hash of the request: in memory, SQLite or Redis."""

from __future__ import annotations

import os
import sqlite3
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Protocol

from rewards.terms.term import RewardUnavailableError

_MAX_REMEMBERED = 10_000
_BUSY_TIMEOUT_S = 30.0
_REDIS_TIMEOUT_S = 5.0
_REDIS_PREFIX = "d1:judge:"


class AnswerCache(Protocol):
    """Answers by key, used by several threads. Those on disk and in Redis are also shared by processes."""

    def get(self, key: str) -> str | None:
        """Return the answer of a key; None if there is none. Raises RewardUnavailableError if the store fails."""
        ...

    def put(self, key: str, answer: str) -> None:
        """Store an answer. Raises RewardUnavailableError if the store fails."""
        ...


class MemoryCache:
    """The newest answers of this process."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def get(self, key: str) -> str | None:
        """Return the answer of a key."""
        with self._lock:
            return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        """Store an answer, and evict the oldest beyond ten thousand."""
        with self._lock:
            self._answers[key] = answer
            if len(self._answers) > _MAX_REMEMBERED:
                self._answers.popitem(last=False)


class FileCache:
    """One SQLite file on a local disk: SQLite's locks do not work on network file systems."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises ValueError if that fails."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as database, database:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"{path} cannot be used as a cache: {error}") from error

    def get(self, key: str) -> str | None:
        """Return the answer of a key."""
        try:
            with closing(self._connect()) as database:
                row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise RewardUnavailableError(f"the judge's cache {self._path} fails: {error}") from error
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        """Store an answer."""
        try:
            with closing(self._connect()) as database, database:
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        except sqlite3.Error as error:
            raise RewardUnavailableError(f"the judge's cache {self._path} fails: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        # SQLite connections belong to a thread. Opening one takes 0.1 ms, far less than an answer.
        return sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)


class RedisCache:
    """A Redis server that the graders of all machines share."""

    def __init__(self, url: str) -> None:
        """Create the client. Raises ValueError if `url` is not a Redis URL."""
        import redis

        self._error = redis.RedisError
        self._redis = redis.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S, decode_responses=True
        )

    def get(self, key: str) -> str | None:
        """Return the answer of a key."""
        try:
            answer = self._redis.get(_REDIS_PREFIX + key)
        except self._error as error:
            raise self._unavailable(error) from error
        return None if answer is None else str(answer)

    def put(self, key: str, answer: str) -> None:
        """Store an answer."""
        try:
            self._redis.set(_REDIS_PREFIX + key, answer)
        except self._error as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> RewardUnavailableError:
        # Without the URL, which may contain a password.
        return RewardUnavailableError(f"the judge's cache in Redis does not answer: {type(error).__name__}")


def open_cache(path: Path | None, redis_env: str | None) -> AnswerCache:
    """Open the configured cache, or one in memory if none is configured.

    Raises ValueError if it cannot be opened.
    """
    if redis_env is not None:
        if not (url := os.environ.get(redis_env)):
            raise ValueError(f"the environment variable {redis_env} is not set; the judge's cache needs a Redis URL")
        try:
            return RedisCache(url)
        except ValueError as error:
            raise ValueError(f"the environment variable {redis_env} has no Redis URL: {error}") from error
    return MemoryCache() if path is None else FileCache(path)
