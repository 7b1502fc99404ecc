"""Engine process of the transport benchmark, and the ingress's transports to it."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

from benchmarks.service.grpc_transport import GrpcClient
from benchmarks.service.scripted_engine import (
    BYTES_TO_ENGINE,
    GRPC,
    GRPC_BYTES,
    GRPC_TLS,
    MESSAGES,
    OURS,
    Contacts,
    Reading,
    serve,
)
from deploy.service.contract import EngineState, Job
from deploy.service.link.contact import Contact
from deploy.service.link.fleet import Fleet

_ANSWER_TIMEOUT_S = 120.0


class Transport(Protocol):
    """Client side of a transport, used by the ingress."""

    def stream(self, job: Job) -> AsyncGenerator[Any]:
        """Stream the events of a job, as `Backend.stream`."""

    async def aclose(self) -> None:
        """Close all connections."""


class EngineProcess:
    """The engine's process and the transports to it."""

    def __init__(self, pipe: Pipe) -> None:
        """Wait until the process accepts jobs."""
        self._pipe = pipe
        self.contacts: Contacts = self._received()

    def read(self) -> Reading:
        """Read the state of the process."""
        self._pipe.send(None)
        reading: Reading = self._received()
        return reading

    @asynccontextmanager
    async def transports(self) -> AsyncIterator[dict[str, Transport]]:
        """Open all transports, by name."""
        token, ports = self.contacts.token, self.contacts.ports
        made: dict[str, Transport] = {
            OURS: Fleet(_OneEngine(self.contacts.ours)),
            GRPC: GrpcClient(ports[GRPC], MESSAGES, token, None),
            GRPC_TLS: GrpcClient(ports[GRPC_TLS], MESSAGES, token, self.contacts.certificate),
            GRPC_BYTES: GrpcClient(ports[GRPC_BYTES], BYTES_TO_ENGINE, token, None),
        }
        async with AsyncExitStack() as stack:
            for one in made.values():
                await stack.enter_async_context(aclosing(one))
            yield made

    def _received(self) -> Any:
        if not self._pipe.poll(_ANSWER_TIMEOUT_S):
            raise TimeoutError(f"the engine's process said nothing for {_ANSWER_TIMEOUT_S:.0f} s")
        return self._pipe.recv()


class _OneEngine:
    """Engine directory with a single engine."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact

    async def contacts(self) -> list[Contact]:
        return [self._contact]

    async def states(self) -> list[EngineState]:
        return []


@contextmanager
def engine_process() -> Iterator[EngineProcess]:
    """Start the engine's process. It stops when its pipe closes."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(far,), daemon=True)
    process.start()
    far.close()
    try:
        yield EngineProcess(near)
    except (EOFError, ConnectionError) as error:
        process.join()
        raise RuntimeError(f"the engine's process ended with exit code {process.exitcode}") from error
    finally:
        near.close()
        process.join()
