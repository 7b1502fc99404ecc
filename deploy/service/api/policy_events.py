"""Event stream of the policy versions: the registry's events with its ids, which are the same on every ingress."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from fastapi.sse import format_sse_event

from actors.registry.records import MalformedEntryError, PolicyVersion, RegistryEvent
from actors.registry.registry import Registry

PING_S = 15.0
"""Interval of comments on a silent stream, in seconds: proxies close silent connections."""
_ENTRY_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")
_MAX_ID_PART = 2**64 - 1
# Past events for a client without Last-Event-ID.
_NUM_BEFORE = 50
_POLL_S = 0.5
_RETRY_S = 2.0
_NUM_THREADS = 2
_Result = TypeVar("_Result")
_Id = tuple[int, int]


class RegistryReader:
    """Asynchronous reader of a run's registry, for any number of clients."""

    def __init__(self, registry: Registry) -> None:
        """Create a reader, which connects at the first call."""
        self._registry = registry
        # Its own threads: an unreachable registry blocks them, and requests need the others.
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="registry-reader")
        self._away_until = 0.0

    async def version(self, number: int) -> PolicyVersion | None:
        """Return the metadata of a version. Raises ConnectionError if the registry is unreachable."""
        return await self._call(lambda: self._registry.version(number))

    def events(self, last_id: str | None, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Stream the events after entry `last_id` as server-sent events; without such an entry, begin with the newest.

        The stream ends when `is_over`; the client then reconnects to another ingress.
        """
        seen, has_begun = _parsed(last_id), False

        async def read() -> list[bytes]:
            nonlocal seen, has_begun
            events = await (self._after(seen or (0, 0)) if has_begun else self._begin(seen))
            has_begun, seen = True, _id_of(events[-1]) if events else seen
            return [_frame(e.id, e.kind, version=e.version, round=e.round, why=e.why, time_s=e.time_s) for e in events]

        return _stream(read, is_over)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _begin(self, seen: _Id | None) -> list[RegistryEvent]:
        try:
            before = await self._call(lambda: self._registry.last_events(_NUM_BEFORE))
        except MalformedEntryError as error:
            return await self._after(_parsed(error.entry_id) or (0, 0))
        # A larger id than the last one is from a registry that has lost its data since.
        if seen is None or not before or seen > _id_of(before[-1]):
            return before
        return await self._after(seen)

    async def _after(self, seen: _Id) -> list[RegistryEvent]:
        while True:
            try:
                return await self._call(self._registry.events, f"{seen[0]}-{seen[1]}")
            except MalformedEntryError as error:
                structlog.get_logger().warning("registry_event_unreadable", error=str(error))
                seen = _parsed(error.entry_id) or seen

    async def _call(self, read: Callable[..., _Result], *arguments: Any) -> _Result:
        def call() -> _Result:
            # Calls that waited for a thread fail at once.
            if time.monotonic() < self._away_until:
                raise ConnectionError("the registry was unreachable a moment ago")
            try:
                return read(*arguments)
            except ConnectionError:
                self._away_until = time.monotonic() + _RETRY_S
                raise

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def one_event(policy: PolicyVersion, last_id: str | None, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Stream the only event of a single checkpoint, `serving`, unless it has the id `last_id`."""
    event_id = f"checkpoint-{policy.version}"
    event = _frame(event_id, "serving", version=policy.version, round=policy.round, why=None, time_s=time.time())
    unsent = [] if last_id == event_id else [event]

    async def read() -> list[bytes]:
        sent = unsent.copy()
        unsent.clear()
        return sent

    return _stream(read, is_over)


async def _stream(
    read: Callable[[], Awaitable[list[bytes]]], is_over: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Stream what `read` returns, again and again, and comments while there is nothing."""
    yield format_sse_event(comment="d1")
    sent_at = time.monotonic()
    while not is_over():
        idle = "ping"
        try:
            frames = await read()
        except ConnectionError:
            frames, idle = [], "the registry cannot be reached"
        for one in frames:
            yield one
        if frames:
            sent_at = time.monotonic()
            continue
        if time.monotonic() - sent_at > PING_S:
            sent_at = time.monotonic()
            yield format_sse_event(comment=idle)
        await asyncio.sleep(_POLL_S)


def _frame(event_id: str, kind: str, *, time_s: float, **body: int | str | None) -> bytes:
    data = json.dumps({**body, "time_s": round(time_s, 3)})
    return f"id: {event_id}\nevent: {kind}\ndata: {data}\n\n".encode()


def _parsed(entry_id: str | None) -> _Id | None:
    """Return the two numbers of an id; None if it is invalid."""
    match = _ENTRY_ID.fullmatch(entry_id or "")
    if match is None:
        return None
    parts = int(match[1]), int(match[2] or 0)
    return parts if max(parts) <= _MAX_ID_PART else None


def _id_of(event: RegistryEvent) -> _Id:
    parsed = _parsed(event.id)
    assert parsed is not None, "ids of the server are valid"
    return parsed
