"""An engine's server: a job comes over a connection, and its events go back over it; then the next may come.

A call through Ray Serve costs the two processes more than most denoise steps do (docs/benchmarks.md). Ray finds the
engines, watches and replaces them; jobs go past it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import aclosing, suppress

import structlog
from structlog.contextvars import bind_contextvars

from deploy.service.contract import ENGINE_FAILED, Job, num_open_after
from deploy.service.engine.engine_host import EngineHost
from deploy.service.link.cancellation import EndedError, unless
from deploy.service.link.connection import SECRET_BYTES, Connection, ProtocolError
from deploy.service.link.contact import IDLE_TIMEOUT_S, LOOPBACK, Contact

_OPEN_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_BACKLOG = 512


class EngineServer:
    """Takes jobs for one engine, on a thread of its own."""

    def __init__(self, host: EngineHost, replica: str) -> None:
        """Start the thread. No port is open before somebody asks for a contact."""
        self._host, self._replica = host, replica
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._servers: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
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

    def close(self, timeout_s: float) -> None:
        """Take no more connections, give those that are open so long, and end the thread. Not from that thread."""
        ended = asyncio.run_coroutine_threadsafe(self._end(timeout_s), self._loop)
        with suppress(TimeoutError):
            ended.result(timeout_s + _CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self, timeout_s: float) -> None:
        self._is_closing = True
        for server in self._servers.values():
            server.close()
        for connection in self._connections - self._busy:
            connection.cancel()
        if self._busy:
            await asyncio.wait(self._busy, timeout=timeout_s)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _open(self, address: str) -> Contact:
        async with self._opening:
            if self._is_closing:
                raise OSError("the engine takes no more jobs")
            if address not in self._servers:
                self._servers[address] = await asyncio.start_server(self._take, address, 0, backlog=_BACKLOG)
        port = self._servers[address].sockets[0].getsockname()[1]
        return Contact(replica=self._replica, host=address, port=port, secret=self._secret)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None, "asyncio gives each connection a task"
        self._connections.add(connection)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                wire = await Connection.accept(reader, writer, self._secret)
            await self._answer_jobs(wire, connection)
        except ProtocolError as error:
            structlog.get_logger().warning("job_of_a_stranger", error=str(error))
        except (EOFError, OSError, TimeoutError):
            # Whoever asked has gone.
            return
        except asyncio.CancelledError:
            # asyncio takes it for an error of the connection's.
            if not self._is_closing:
                raise
        finally:
            self._connections.discard(connection)
            self._busy.discard(connection)
            writer.close()
            with suppress(OSError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await writer.wait_closed()
            writer.transport.abort()

    async def _answer_jobs(self, wire: Connection, connection: asyncio.Task[None]) -> None:
        """One after the other. When the other side goes, its job is cancelled at once."""
        upcoming = asyncio.ensure_future(wire.receive())
        try:
            while not self._is_closing:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    job = await asyncio.shield(upcoming)
                if self._is_closing:
                    return
                if not isinstance(job, Job):
                    raise ProtocolError(f"{type(job).__name__} is no job")
                # Awaited while the job is under way, since that is how one hears that the other side has gone.
                upcoming = asyncio.ensure_future(wire.receive())
                self._busy.add(connection)
                try:
                    await unless(self._send_events(wire, job), upcoming)
                except EndedError:
                    # It has gone, and this raises how.
                    upcoming.result()
                    raise ProtocolError("a job came before the end of the last one") from None
                self._busy.discard(connection)
        finally:
            upcoming.cancel()
            await asyncio.wait((upcoming,))

    async def _send_events(self, wire: Connection, job: Job) -> None:
        """Each message is some events, and whether they are the job's last."""
        num_left = len(job.requests)
        bind_contextvars(request_id=job.request_id)
        try:
            async with aclosing(self._host.stream(job)) as stream:
                async for events in stream:
                    num_left = num_open_after(events, num_left)
                    await wire.send((not num_left, events))
                    if not num_left:
                        # The next job may come from now on.
                        return
        except OSError:
            raise
        except Exception:
            structlog.get_logger().exception("job_failed")
            await wire.send((True, [ENGINE_FAILED]))
