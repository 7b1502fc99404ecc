"""Transport benchmark: latency and CPU time of a job from ingress to engine, ours against grpc.aio.

    python -m benchmarks.service.transport

It uses two processes without Ray. This one is the ingress, on the event loop of its HTTP server. The other is a
scripted engine that sends 8 events per job. The transports alternate within each round, so that all see the same
machine load. Ratios are medians of per-round ratios. Latency is to the last event, minus the scripted pauses. CPU time
includes both processes. `grpc.aio, bytes` carries preserialised messages, to measure gRPC without serialisation. A
plain Python loop calibrates the machine's speed.

`--out FILE` writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.service.engine_process import EngineProcess, Transport, engine_process
from benchmarks.service.scripted_engine import ENDLESS, NUM_EVENTS, make_events, make_job
from benchmarks.service.table import machine, save
from benchmarks.service.transport_tables import Found, Load, Series
from deploy.service.contract import Job
from deploy.service.link.serialization import pack, unpack

_LOOP_STEPS = 10_000_000
_CANCEL_TIMEOUT_S, _LOOK_EVERY_S = 10.0, 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Amount of measurement."""

    num_rounds: int = 20
    num_jobs: int = 100
    """Jobs per transport and round, at each load."""
    num_clients: int = 16
    pause_ms: float = 2.0
    """Pause between two events, as if an engine were denoising."""
    num_cancellations: int = 5
    """Cancelled jobs per transport and round."""

    @property
    def loads(self) -> list[Load]:
        """Return the loads, the deciding one first."""
        pause_us = round(1e3 * self.pause_ms)
        return [
            Load(num_clients=1, pause_us=0),
            Load(num_clients=self.num_clients, pause_us=0),
            Load(num_clients=1, pause_us=pause_us),
        ]


async def measure(engine: EngineProcess, plan: Plan) -> Found:
    """Run all measurements."""
    async with engine.transports() as transports:
        jobs = {load: {name: Series() for name in transports} for load in plan.loads}
        found = Found(jobs=jobs, left_s={name: [] for name in transports}, messages_cpu_s=[], loops=[])
        for load in jobs:
            for transport in transports.values():
                await _answered(transport, load, 2 * load.num_clients)
        for index in range(plan.num_rounds):
            for name in _turned(list(transports), index):
                for load, of in jobs.items():
                    latencies_s, cpu_s = await _measured(engine, transports[name], load, plan.num_jobs)
                    of[name].latencies_s.append(latencies_s)
                    of[name].cpu_s.append(cpu_s)
                found.left_s[name] += [
                    await _cancelled(engine, transports[name]) for _ in range(plan.num_cancellations)
                ]
            found.messages_cpu_s.append(_messages_cpu_s(plan.num_jobs))
            found.loops.append(_loop())
    return found


async def _measured(
    engine: EngineProcess, transport: Transport, load: Load, num_jobs: int
) -> tuple[list[float], float]:
    """Measure the latency of each job, and the mean CPU time per job of both processes, in seconds."""
    gc.collect()
    before_s = time.process_time() + engine.read().cpu_s
    latencies_s = await _answered(transport, load, num_jobs)
    return latencies_s, (time.process_time() + engine.read().cpu_s - before_s) / num_jobs


async def _answered(transport: Transport, load: Load, num_jobs: int) -> list[float]:
    """Run jobs of closed-loop clients. Returns the latency of each job in seconds."""
    job, latencies_s = make_job(load.pause_us), list[float]()
    upcoming = iter(range(num_jobs))

    async def ask() -> None:
        for _ in upcoming:
            latencies_s.append(await _latency_s(transport, job) - (NUM_EVENTS - 1) * load.pause_us / 1e6)

    await asyncio.gather(*(ask() for _ in range(load.num_clients)))
    return latencies_s


async def _latency_s(transport: Transport, job: Job) -> float:
    began_s, last_s, num_events = time.perf_counter(), 0.0, 0
    async with aclosing(transport.stream(job)) as stream:
        async for _ in stream:
            last_s, num_events = time.perf_counter(), num_events + 1
    assert num_events == NUM_EVENTS, "each event comes by itself"
    return last_s - began_s


async def _cancelled(engine: EngineProcess, transport: Transport) -> float:
    """Measure the seconds from a client's disconnect to the end of its job in the engine."""
    num_before = engine.read().num_left
    async with aclosing(transport.stream(make_job(ENDLESS))) as stream:
        await anext(stream)
        began_s = time.monotonic()
    async with asyncio.timeout(_CANCEL_TIMEOUT_S):
        while (reading := engine.read()).num_left == num_before:
            await asyncio.sleep(_LOOK_EVERY_S)
    return reading.left_s - began_s


def _turned(names: list[str], index: int) -> list[str]:
    """Rotate the order, so that each transport goes first equally often."""
    first = index % len(names)
    return names[first:] + names[:first]


def _messages_cpu_s(num_jobs: int) -> float:
    messages = [make_job(), *make_events()]
    began_s = time.process_time()
    for _ in range(num_jobs):
        for message in messages:
            unpack(pack(message))
    return (time.process_time() - began_s) / num_jobs


def _loop() -> tuple[float, float]:
    """Measure wall and CPU seconds of a plain loop."""
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for _ in range(_LOOP_STEPS):
        pass
    return time.perf_counter() - began_s, time.process_time() - cpu_began_s


def run(plan: Plan) -> dict[str, Any]:
    """Run the benchmark and print it. Returns the results for JSON."""
    # Use the event loop of the ingress's HTTP server.
    new_loop = uvicorn.Config("").get_loop_factory()
    with engine_process() as engine, asyncio.Runner(loop_factory=new_loop) as runner:
        return {"plan": asdict(plan), **runner.run(measure(engine, plan)).report()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    for column in fields(Plan):
        flag = f"--{column.name.replace('_', '-').removeprefix('num-')}"
        parser.add_argument(flag, dest=column.name, type=type(column.default), default=column.default)
    options = parser.parse_args()
    print(machine())
    save(options.out, run(Plan(**{column.name: getattr(options, column.name) for column in fields(Plan)})))


if __name__ == "__main__":
    main()
