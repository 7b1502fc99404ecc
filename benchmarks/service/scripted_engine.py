"""The engine's process of the transport's benchmark: a script instead of a policy, behind every transport."""

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
"""What a job wants that never ends by itself."""
OURS, GRPC, GRPC_TLS, GRPC_BYTES = "own", "grpc.aio", "grpc.aio, TLS", "grpc.aio, bytes"
"""The transports. The last carries bytes that were made before: what gRPC costs if messages cost nothing."""
MESSAGES = Codec(to_bytes=pack, from_bytes=unpack)
BYTES_TO_ENGINE = Codec(to_bytes=lambda job: pack(job.wanted), from_bytes=bytes)
_BYTES_FROM_ENGINE = Codec(to_bytes=bytes, from_bytes=unpack)
_BLOCK_LENGTH, _NUM_BLOCKS, _PROMPT_TOKENS = 8, NUM_EVENTS - 2, 24
_FOREVER_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Contacts:
    """Where the engine takes jobs over each transport."""

    ours: Contact
    ports: dict[str, int]
    """Of gRPC's."""
    token: str
    certificate: bytes
    """The one of gRPC over TLS, in PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the engine's process stands."""

    cpu_s: float
    num_left: int
    """Endless jobs that have ended."""
    left_s: float
    """When the last of them did, on the clock that all processes of a machine share."""


def make_job(wanted: str | int = 0) -> Job:
    """A job of one choice. It wants so many microseconds between its events, or `ENDLESS`."""
    params = SamplingParams(gen_length=_BLOCK_LENGTH * _NUM_BLOCKS, block_length=_BLOCK_LENGTH, num_denoise_steps=48)
    request = Request(prompt_ids=tuple(range(_PROMPT_TOKENS)), params=params, seed=1)
    return Job(requests=(request,), wanted=wanted)


def make_events() -> list[list[Event]]:
    """What a job tells: its version, its blocks one by one, its end."""
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
    """Tells every job the same, as `EngineHost.stream` would."""

    def __init__(self) -> None:
        self._events, self._packed = make_events(), [pack(events) for events in make_events()]
        self._num_left, self._left_s = 0, 0.0

    async def stream(self, job: Job) -> AsyncGenerator[Any]:
        """As `Backend.stream`, at the pace that the job wants."""
        async for events in self._told(self._events, job.wanted):
            yield events

    async def stream_bytes(self, wanted: str | int) -> AsyncGenerator[bytes]:
        """The same as bytes; what the job wants is all that came of it."""
        async for packed in self._told(self._packed, wanted):
            yield packed

    @property
    def reading(self) -> Reading:
        """How this process stands."""
        return Reading(cpu_s=time.process_time(), num_left=self._num_left, left_s=self._left_s)

    async def _told(self, messages: list[Any], wanted: str | int) -> AsyncGenerator[Any]:
        try:
            yield messages[0]
            for message in messages[1:]:
                # A real engine's events come from another thread, so each waits for a turn of the loop at least.
                await asyncio.sleep(_FOREVER_S if wanted == ENDLESS else int(wanted) / 1e6)
                yield message
        finally:
            if wanted == ENDLESS:
                self._num_left, self._left_s = self._num_left + 1, time.monotonic()


def serve(pipe: Pipe) -> None:
    """Take jobs over every transport until the pipe ends; whatever comes through it is answered with a `Reading`."""
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
