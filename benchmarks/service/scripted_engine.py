"""Scripted engine of the transport benchmark: serves fixed events over every transport."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import numpy as np

from actors.registry.records import PolicyVersion
from benchmarks.service.grpc_transport import Codec, GrpcServer, make_certificate
from deploy.service.contract import Began, BlocksDone, Done, Event, Job
from deploy.service.engine.engine_host import EngineHost
from deploy.service.engine.engine_server import EngineServer
from deploy.service.link.connection import SECRET_BYTES
from deploy.service.link.contact import Contact
from deploy.service.link.serialization import pack, unpack
from rollout.request import Committed, Completion, FinishReason, Request, SamplingParams

NUM_EVENTS = 8
ENDLESS = "endless"
"""Marks a job that runs until it is cancelled."""
OURS, GRPC, GRPC_TLS, GRPC_BYTES = "own", "grpc.aio", "grpc.aio, TLS", "grpc.aio, bytes"
"""Names of the transports. The last carries preserialised bytes, to measure gRPC without serialisation."""
MESSAGES = Codec(to_bytes=pack, from_bytes=unpack)
BYTES_TO_ENGINE = Codec(to_bytes=lambda job: pack(job.wanted), from_bytes=bytes)
_BYTES_FROM_ENGINE = Codec(to_bytes=bytes, from_bytes=unpack)
_BLOCK_LENGTH, _NUM_BLOCKS, _PROMPT_TOKENS = 8, NUM_EVENTS - 2, 24
_FOREVER_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Contacts:
    """Addresses and credentials of the engine's transports."""

    ours: Contact
    ports: dict[str, int]
    """Ports of the gRPC transports."""
    token: str
    certificate: bytes
    """Certificate of gRPC over TLS, PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """State of the engine's process."""

    cpu_s: float
    num_left: int
    """Number of endless jobs that were cancelled."""
    left_s: float
    """When the last of them ended, on the machine-wide monotonic clock."""


def make_job(wanted: str | int = 0) -> Job:
    """Make a job of one choice. `wanted` is its pause between events in microseconds, or `ENDLESS`."""
    params = SamplingParams(gen_length=_BLOCK_LENGTH * _NUM_BLOCKS, block_length=_BLOCK_LENGTH, num_denoise_steps=48)
    request = Request(prompt_ids=tuple(range(_PROMPT_TOKENS)), params=params, seed=1)
    return Job(requests=(request,), wanted=wanted)


def make_events() -> list[list[Event]]:
    """Make the events of a job: its version, its blocks one by one, its end."""
    nothing = dict.fromkeys(("num_correct", "num_problems", "checkpoint", "weight_store", "manifest_digest"))
    policy = PolicyVersion(version=3, round=2, phase="rl", **nothing)
    gen_length = _BLOCK_LENGTH * _NUM_BLOCKS
    blocks: list[list[Event]] = [
        [BlocksDone(choice=0, start=start, slots=Committed(**_columns(_BLOCK_LENGTH)))]
        for start in range(0, gen_length, _BLOCK_LENGTH)
    ]
    completion = Completion(
        **_columns(gen_length),
        num_tokens=gen_length,
        num_forwards=gen_length,
        exact=True,
        logp_exact=True,
        finish_reason=FinishReason.LENGTH,
        policy_version=policy.version,
    )
    return [[Began(policy=policy)], *blocks, [Done(choice=0, completion=completion)]]


def _columns(num_slots: int) -> dict[str, Any]:
    ids, logps = np.arange(num_slots, dtype=np.int32), np.linspace(-2, 0, num_slots, dtype=np.float32)
    floats = dict.fromkeys(("commit_logp", "commit_logp_raw", "commit_entropy", "commit_law_entropy"), logps)
    return {"token_ids": ids, "step_map": ids, "fallback": np.zeros(num_slots, dtype=np.bool_), **floats}


class ScriptedEngine:
    """Engine that sends every job the same events, with the interface of `EngineHost.stream`."""

    def __init__(self) -> None:
        self._events, self._packed = make_events(), [pack(events) for events in make_events()]
        self._num_left, self._left_s = 0, 0.0

    async def stream(self, job: Job) -> AsyncGenerator[Any]:
        """Stream the events as `Backend.stream`, at the job's pace."""
        async for events in self._told(self._events, job.wanted):
            yield events

    async def stream_bytes(self, wanted: str | int) -> AsyncGenerator[bytes]:
        """Stream the same events as serialised bytes. Only `wanted` is received of the job."""
        async for packed in self._told(self._packed, wanted):
            yield packed

    @property
    def reading(self) -> Reading:
        """Return the state of this process."""
        return Reading(cpu_s=time.process_time(), num_left=self._num_left, left_s=self._left_s)

    async def _told(self, messages: list[Any], wanted: str | int) -> AsyncGenerator[Any]:
        try:
            yield messages[0]
            for message in messages[1:]:
                # A real engine's events come from another thread, so each takes at least one iteration of the loop.
                await asyncio.sleep(_FOREVER_S if wanted == ENDLESS else int(wanted) / 1e6)
                yield message
        finally:
            if wanted == ENDLESS:
                self._num_left, self._left_s = self._num_left + 1, time.monotonic()


def serve(pipe: Pipe) -> None:
    """Serve jobs over every transport until the pipe closes. Each message on the pipe is answered with a `Reading`."""
    with suppress(EOFError):
        asyncio.run(_serve(pipe))


async def _serve(pipe: Pipe) -> None:
    engine, token, certificate = ScriptedEngine(), secrets.token_hex(SECRET_BYTES), make_certificate()
    ours = EngineServer(cast(EngineHost, engine), OURS)
    servers = {
        GRPC: GrpcServer(engine.stream, MESSAGES, token),
        GRPC_TLS: GrpcServer(engine.stream, MESSAGES, token),
        GRPC_BYTES: GrpcServer(engine.stream_bytes, _BYTES_FROM_ENGINE, token),
    }
    try:
        ports = {name: await one.start(certificate if name == GRPC_TLS else None) for name, one in servers.items()}
        contact = await asyncio.to_thread(ours.contact)
        pipe.send(Contacts(ours=contact, ports=ports, token=token, certificate=certificate.certificate))
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(engine.reading)
    finally:
        for server in servers.values():
            await server.stop()
        await asyncio.to_thread(ours.close, 0.0)
