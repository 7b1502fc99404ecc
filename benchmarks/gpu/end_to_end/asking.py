"""Clients of a run's service: single requests, and closed-loop load."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.error import HTTPError

from benchmarks.gpu.end_to_end.visit import StageError

_TIMEOUT_S = 120.0
_TOO_MANY, _SERVER_ERRORS = 429, 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Answer to one request."""

    seconds: float
    policy_version: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Client of a service on this machine."""

    port: int
    token_path: Path
    prompt: str

    def is_up(self) -> bool:
        """Check whether the service answers. Raises StageError if it rejects the request itself."""
        try:
            self.ask()
        except HTTPError as error:
            if error.code < _SERVER_ERRORS and error.code != _TOO_MANY:
                raise StageError(
                    f"the service answers {error.code}: {error.read().decode(errors='replace')}"
                ) from error
            return False
        except (OSError, ValueError):
            return False
        return True

    def ask(self) -> Answered:
        """Request one chat completion. Raises OSError if there is no answer."""
        body = json.dumps({"messages": [{"role": "user", "content": self.prompt}]}).encode()
        headers = {
            "Authorization": f"Bearer {self.token_path.read_text().strip()}",
            "Content-Type": "application/json",
        }
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        began = time.monotonic()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=_TIMEOUT_S) as answer:
            said = json.loads(answer.read())
        return Answered(
            seconds=time.monotonic() - began,
            policy_version=said["policy_version"],
            text=said["choices"][0]["message"]["content"],
        )


@dataclass(kw_only=True, slots=True)
class Load:
    """Answers to the clients under load."""

    answers: list[Answered] = field(default_factory=list)
    num_failed: int = 0

    def in_words(self) -> str:
        """Format for the table."""
        times = [answer.seconds for answer in self.answers]
        if not times:
            return f"no answer, {self.num_failed} failed"
        versions = len({answer.policy_version for answer in self.answers})
        spread = f"median {median(times):.2f} s, slowest {max(times):.2f} s"
        return f"{len(times)} answers of {versions} versions, {self.num_failed} failed: {spread}"


@contextmanager
def under_load(client: Client, num_clients: int) -> Iterator[Load]:
    """Run `num_clients` closed-loop clients during the block."""
    load, ended = Load(), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                load.answers.append(client.ask())
            except (OSError, ValueError):
                load.num_failed += 1
                ended.wait(1.0)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        ended.set()
        for thread in threads:
            thread.join(_TIMEOUT_S)
