"""An HTTP server on a thread of a replica, with a port of its own.

Ray Serve's proxy and its calls cost more than all the rest of a request (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from deploy.service.gateway.address import Address
from deploy.service.gateway.http_protocol import BoundedHttpProtocol, announced

ON_HEAD = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
"""What a deployment asks of Ray that listens where the service was started: no other node is meant by 127.0.0.1."""
# The one that this one replaces may still be ending.
_BIND_TIMEOUT_S = 30.0
_POLL_S = 0.2
_BACKLOG = 1024
_KEEP_ALIVE_S = 75
# Of the event loop, from a connection that is taken to what answers it.
_TURNS = 4
# It ticks ten times a second.
_HUNG_AFTER_S = 30.0


class HttpServer:
    """Serves an application until it is told to end."""

    def __init__(self, app: ASGIApp, address: Address, *, end_within_s: float, shares_port: bool = False) -> None:
        """Listen.

        Args:
            app: the application.
            address: where.
            end_within_s: how long requests under way have, once it is told to end.
            shares_port: whether other processes of this user may listen there too; the kernel gives each new connection
                to one of them.

        Raises:
            OSError: the port stays taken.
        """
        config = uvicorn.Config(
            announced(app),
            http=BoundedHttpProtocol,
            # It would close the handlers of Ray Serve's log, without which a restarted controller replaces the replica.
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # Longer than clients keep a connection that they do not use: none asks over one that is just closing.
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="none",
            timeout_graceful_shutdown=round(end_within_s),
        )
        self._server = _Ticking(config)
        self._listening = _bound(address, shares_port=shares_port)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listening]}, name="http", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise RuntimeError where its thread has died, or something has held up its event loop for long."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread of the HTTP server has died")
        # While it ends it does not tick.
        if self._server.should_exit:
            return
        if (silent_s := time.monotonic() - self._server.ticked_s) > _HUNG_AFTER_S:
            raise RuntimeError(f"the event loop of the HTTP server has not turned for {silent_s:.0f} s")

    def end(self, timeout_s: float) -> None:
        """Take no more connections, let what is under way come to its end, and wait for it."""
        self._server.should_exit = True
        self._thread.join(timeout_s)


class _Ticking(uvicorn.Server):
    """Remembers when its event loop last turned, and when it ends takes who waits for it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ticked_s = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        self.ticked_s = time.monotonic()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The kernel resets a connection that waits to be taken when nobody listens any more: they are taken first.
        waiting = [connection for listening in sockets or [] for connection in _waiting(listening)]
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        for connection in waiting:
            await loop.connect_accepted_socket(self._protocol, connection)
        # Those that the loop had just taken have their protocol then.
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await super().shutdown(sockets)

    def _protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _waiting(listening: socket.socket) -> Iterator[socket.socket]:
    """The connections that wait to be taken."""
    while True:
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        yield connection


def _bound(address: Address, *, shares_port: bool) -> socket.socket:
    deadline = time.monotonic() + _BIND_TIMEOUT_S
    while True:
        try:
            return socket.create_server(
                (address.host, address.port), family=address.family, backlog=_BACKLOG, reuse_port=shares_port
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
