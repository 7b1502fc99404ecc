"""An engine's own listener: a job comes over a connection of its own, and its events go back over it.

A call through Ray Serve costs the two processes more than most denoise steps do (docs/benchmarks.md). Ray finds the
engines, watches and replaces them; jobs go past it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import structlog

from deploy.service.host import EngineHost
from deploy.service.messages import Job, Refused
from deploy.service.wire import SECRET_BYTES, Wire

LOOPBACK = "127.0.0.1"
_OPEN_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 5.0
_BACKLOG = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """Where an engine takes jobs, and from whom."""

    replica: str
    """The engine's id."""
    host: str
    port: int
    secret: bytes = field(repr=False)
    """What signs each message."""


class JobListener:
    """Takes jobs for one engine, on a thread of its own."""

    def __init__(self, host: EngineHost, replica: str) -> None:
        """Start the thread. No port is open before somebody asks for a contact."""
        self._host, self._replica = host, replica
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._servers: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jobs", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def contact(self, address: str = LOOPBACK) -> Contact:
        """Where it is reached at an address of this machine; the first time, a port is opened there. From any thread.

        Raises OSError or TimeoutError where it cannot be opened.
        """
        opened = asyncio.run_coroutine_threadsafe(self._open(address), self._loop)
        return opened.result(_OPEN_TIMEOUT_S)

    def close(self) -> None:
        """Take no more connections; those that are open go on. From any thread."""
        self._loop.call_soon_threadsafe(lambda: [server.close() for server in self._servers.values()])

    async def _open(self, address: str) -> Contact:
        async with self._opening:
            if address not in self._servers:
                self._servers[address] = await asyncio.start_server(self._take, address, 0, backlog=_BACKLOG)
        port = self._servers[address].sockets[0].getsockname()[1]
        return Contact(replica=self._replica, host=address, port=port, secret=self._secret)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                wire = await Wire.accept(reader, writer, self._secret)
                job = await wire.receive()
            await self._answer(wire, job)
        except (EOFError, OSError, TimeoutError) as error:
            # A client that has gone, or a stranger; an ingress whose connection broke goes elsewhere.
            structlog.get_logger().info("job_connection_ended", error=f"{type(error).__name__}: {error}")
        finally:
            writer.close()

    async def _answer(self, wire: Wire, job: Job) -> None:
        """Send the events; when the other side goes, the job is cancelled at once."""
        sending = asyncio.ensure_future(self._send_events(wire, job))
        gone = asyncio.ensure_future(wire.ended())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in (sending, gone):
                future.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    async def _send_events(self, wire: Wire, job: Job) -> None:
        try:
            async with aclosing(self._host.stream(job)) as stream:
                async for events in stream:
                    await wire.send(events)
        except OSError:
            raise
        # A mistake of ours, which another engine would make again.
        except Exception:
            structlog.get_logger().exception("job_failed")
            message = "The policy failed; see the service's log."
            await wire.send([Refused(status=500, code="engine_failed", message=message)])
