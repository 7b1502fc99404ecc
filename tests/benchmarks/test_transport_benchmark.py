"""Tests of the transport benchmark: measurements, and gRPC's rejection of unauthenticated clients."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from multiprocessing.process import BaseProcess

import pytest

from benchmarks.service.engine_process import EngineProcess, engine_process
from benchmarks.service.grpc_transport import GrpcClient, make_certificate
from benchmarks.service.scripted_engine import GRPC, GRPC_BYTES, GRPC_TLS, MESSAGES, OURS, make_job
from benchmarks.service.transport import Plan, measure
from deploy.service.contract import Done, EngineLostError

TRANSPORTS = [OURS, GRPC, GRPC_TLS, GRPC_BYTES]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process() as process:
        yield process


@pytest.mark.nightly
def test_every_transport_is_measured_under_every_load(engine: EngineProcess) -> None:
    plan = Plan(num_rounds=1, num_jobs=3, num_clients=2, pause_ms=0.1, num_cancellations=1)
    result = asyncio.run(measure(engine, plan)).report()
    assert [row["transport"] for row in result["rows"]] == TRANSPORTS * len(plan.loads)
    assert {row["jobs"] for row in result["rows"]} == {3}
    assert [(row["transport"], row["n"]) for row in result["cancellation"]] == [(name, 1) for name in TRANSPORTS]
    assert len(result["checks"]) == 2 * len(TRANSPORTS[1:])


def test_every_transport_tells_the_same(engine: EngineProcess) -> None:
    async def told() -> dict[str, int]:
        async with engine.transports() as transports:
            found = {}
            for name in (OURS, GRPC, GRPC_TLS):
                async with aclosing(transports[name].stream(make_job())) as stream:
                    events = [event async for some in stream for event in some]
                assert isinstance(events[-1], Done)
                found[name] = len(events)
            return found

    assert asyncio.run(told()) == dict.fromkeys((OURS, GRPC, GRPC_TLS), 8)


def refusal(engine: EngineProcess, name: str, token: str, trusted: bytes | None) -> str:
    """Return the error of a gRPC client that is refused."""

    async def ask() -> None:
        async with aclosing(GrpcClient(engine.contacts.ports[name], MESSAGES, token, trusted)) as client:
            async for _ in client.stream(replace(make_job(), timeout_s=5.0)):
                pass

    with pytest.raises(EngineLostError) as caught:
        asyncio.run(ask())
    return str(caught.value)


def test_grpc_refuses_who_does_not_know_the_token(engine: EngineProcess) -> None:
    contacts = engine.contacts
    assert refusal(engine, GRPC, "k" * 64, None) == "UNAUTHENTICATED: The token is wrong."
    assert refusal(engine, GRPC_TLS, "k" * 64, contacts.certificate) == "UNAUTHENTICATED: The token is wrong."


def test_over_tls_grpc_tells_the_token_to_no_other_engine(engine: EngineProcess) -> None:
    assert refusal(engine, GRPC_TLS, engine.contacts.token, make_certificate().certificate).startswith("UNAVAILABLE")


def read_of_the_dead(others: list[BaseProcess]) -> None:
    """Kill an engine's process, then read its state."""
    with engine_process() as engine:
        (process,) = (child for child in multiprocessing.active_children() if child not in others)
        process.kill()
        process.join()
        engine.read()


def test_an_engine_whose_process_dies_is_named(engine: EngineProcess) -> None:
    with pytest.raises(RuntimeError, match="the engine's process ended with exit code -9"):
        read_of_the_dead(multiprocessing.active_children())
