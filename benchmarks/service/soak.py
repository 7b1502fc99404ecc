"""Soak test: memory growth of ingress and engines under mixed load.

The load is requests, clients that disconnect, bad requests and new versions. Growth is the slope of memory over the
requests of the second half. In the first half, bounded stores fill: versions in memory, retained events, the
allocator's arenas. Memory is a process's anonymous and shared pages. File-backed pages of libraries are excluded, since
they depend on other processes of the machine.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.service.deployment import ROLES, Deployed, processes
from benchmarks.service.load import Client, Judge, for_seconds, mixed_asks
from benchmarks.service.table import show, times, verdict

_MIB = 1024 * 1024
_LEAST_LOOKS = 12
_SLOPE = "growth per 1,000 requests"
_EVENTS = "/v1/policy/events"
_NUM_ASKS = 32
_LOOKED_AT = ("/v1/policy", "/v1/models", "/v1/policy/examples", "/metrics", "/health", "/version")
_BAD: tuple[tuple[str, dict[str, Any], set[int]], ...] = (
    ("/v1/completions", {"content": b"{not json"}, {400, 422}),
    ("/v1/completions", {"json": {"prompt": "2 + 3", "no_such": 1}}, {400}),
    ("/v1/completions", {"json": {"prompt": "2 + 3", "model": "policy@v999999"}}, {404}),
    ("/v1/completions", {"json": {"prompt": "9 " * 2000}}, {400}),
    ("/v1/completions", {"content": b"x" * 1_100_000}, {413}),
    ("/v1/chat/completions", {"json": {"messages": []}}, {400}),
    ("/v1/completions", {"json": {"prompt": "2"}, "headers": {"Authorization": "Bearer wrong"}}, {401}),
    ("/v1/nowhere", {"json": {}}, {404}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Duration and load."""

    minutes: float = 60.0
    num_clients: int = 6
    """Regular clients. One more client disconnects early, one sends bad requests, and one reads the status pages."""
    swap_every_s: float = 5.0
    look_every_s: float = 5.0
    most_growth_mib: float = 1.0
    """Maximum growth of a process per 1,000 requests: 1 KiB per request, less than its tokens take."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Memory of the processes at one time."""

    time_s: float
    num_requests: int
    """Requests of all kinds so far."""
    sizes: dict[str, dict[int, float]]
    """Memory in MiB by role and process id."""


@dataclass(slots=True)
class Outcome:
    """Results of the soak test."""

    looks: list[Look] = field(default_factory=list)
    totals_s: list[float] = field(default_factory=list)
    """Latency of each answer, seconds."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests of each kind."""
    num_swaps: int = 0
    lost: list[str] = field(default_factory=list)
    """Descriptions of wrong answers, refusals and views."""


async def run(service: Deployed, plan: Plan) -> tuple[dict[str, Any], bool]:
    """Run the test and print it. Returns the results for JSON, and whether nothing was lost and no memory grew."""
    return report(plan, await soak(service, plan))


async def soak(service: Deployed, plan: Plan) -> Outcome:
    """Run all clients, the publisher and the memory monitor concurrently."""
    async with aclosing(Client(service.url)) as client:
        soaking = _Soak(service, client, plan)
        await asyncio.gather(
            *(soaking.ask(index) for index in range(plan.num_clients)),
            soaking.hang_up(),
            soaking.ask_badly(),
            soaking.look_around(),
            soaking.publish(),
            soaking.look_at_memory(),
        )
    return soaking.outcome


class _Soak:
    """All concurrent clients of the service, until the time is over."""

    def __init__(self, service: Deployed, client: Client, plan: Plan) -> None:
        self._service, self._client, self._plan = service, client, plan
        self._asks = mixed_asks(service.policies, _NUM_ASKS, plan.seed)
        self._judge, self._has_time = Judge(service.policies), for_seconds(60 * plan.minutes)
        self.outcome = Outcome()

    def _goes_on(self) -> bool:
        """Whether to continue. A minimum number of memory samples, which the slope needs, can extend the time."""
        return self._has_time() or len(self.outcome.looks) < _LEAST_LOOKS

    async def ask(self, index: int) -> None:
        """Send regular requests and check each answer."""
        draw, outcome = random.Random(index), self.outcome
        while self._goes_on():
            answer = await self._client.ask(draw.choice(self._asks))
            outcome.counts["answers"] += 1
            outcome.totals_s.append(answer.total_s)
            found = self._judge.judge([answer])
            outcome.lost += [*found.failed, *found.truncated, *found.mixed]

    async def hang_up(self) -> None:
        """Send requests and disconnect before or during the answer."""
        draw = random.Random(-1)
        while self._goes_on():
            ask = draw.choice(self._asks)
            with suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0.01, 0.3)):
                    async with self._client.http.stream("POST", ask.path, json=ask.sent) as response:
                        await anext(response.aiter_bytes())
            self.outcome.counts["hang-ups"] += 1
            await asyncio.sleep(draw.uniform(0.0, 0.2))

    async def ask_badly(self) -> None:
        """Send invalid requests, which must be refused."""
        while self._goes_on():
            for path, request, statuses in _BAD:
                status = (await self._client.http.post(path, **request)).status_code
                if status not in statuses:
                    self.outcome.lost.append(f"{path} {str(request)[:60]}: {status}")
                self.outcome.counts["bad requests"] += 1
                await asyncio.sleep(0.05)

    async def look_around(self) -> None:
        """Read the endpoints that the web page reads."""
        while self._goes_on():
            for path in _LOOKED_AT:
                status = (await self._client.http.get(path)).status_code
                if status != 200:
                    self.outcome.lost.append(f"{path}: {status}")
                self.outcome.counts["views"] += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5), self._client.http.stream("GET", _EVENTS) as response:
                    async for _ in response.aiter_bytes():
                        pass
            self.outcome.counts["views"] += 1

    async def publish(self) -> None:
        """Publish new versions."""
        while self._goes_on():
            await asyncio.to_thread(self._service.publisher.publish)
            self.outcome.num_swaps += 1
            await asyncio.sleep(self._plan.swap_every_s)

    async def look_at_memory(self) -> None:
        """Sample memory periodically and print it once a minute."""
        began, minute = time.perf_counter(), 0
        while self._goes_on():
            sizes = {role: {pid: own_mib(pid) for pid in sorted(processes(name))} for role, name in ROLES.items()}
            seconds, num_requests = time.perf_counter() - began, self.outcome.counts.total()
            self.outcome.looks.append(Look(time_s=seconds, num_requests=num_requests, sizes=sizes))
            if seconds >= 60 * (minute + 1):
                minute += 1
                said = ", ".join(f"{role} {sum(found.values()):.1f}" for role, found in sizes.items())
                print(f"  {minute} min, {num_requests} requests, MiB: {said}", flush=True)
            await asyncio.sleep(self._plan.look_every_s)


def own_mib(pid: int) -> float:
    """Return a process's anonymous and shared memory in MiB, or 0 if it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kept = ("RssAnon:", "RssShmem:")
        return sum(int(line.split()[1]) for line in lines if line.startswith(kept)) * 1024 / _MIB
    return 0.0


def report(plan: Plan, outcome: Outcome) -> tuple[dict[str, Any], bool]:
    """Print the results. Returns them for JSON, and whether the test passed."""
    rows, limit = growth(outcome.looks), f"<= {plan.most_growth_mib}"
    show(f"memory in {plan.minutes:g} minutes, MiB", rows)
    requests = dict(outcome.counts) | {"versions": outcome.num_swaps} | times(outcome.totals_s)
    show("requests", [requests])
    for why in outcome.lost[:5]:
        print(f"  {why}")
    num_lost = len(outcome.lost)
    checks = [verdict("lost or wrong answers", num_lost, "0", is_met=not num_lost)]
    for row in rows:
        slope = row[_SLOPE]
        is_met = slope <= plan.most_growth_mib
        checks.append(verdict(f"{row['process']}: {_SLOPE}", slope, limit, is_met=is_met))
    show("limits", checks)
    looks = [asdict(look) for look in outcome.looks]
    result = {"plan": asdict(plan), "rows": rows, "requests": requests, "checks": checks, "looks": looks}
    return result, all(check["met"] == "yes" for check in checks)


def growth(looks: list[Look]) -> list[dict[str, Any]]:
    """Compute size and second-half slope of each process that ran from the middle to the end."""
    half = looks[len(looks) // 2 :]
    if len(looks) < _LEAST_LOOKS:
        raise ValueError(f"{len(looks)} looks are too few for a slope: {_LEAST_LOOKS} are the least")
    rows = []
    for role, last in looks[-1].sizes.items():
        for number, pid in enumerate(pid for pid in last if all(pid in look.sizes[role] for look in half)):
            sizes = [look.sizes[role][pid] for look in half]
            slope = statistics.linear_regression([look.num_requests for look in half], sizes).slope
            began = next(look.sizes[role][pid] for look in looks if pid in look.sizes[role])
            rows.append(
                {
                    "process": f"{role} {number + 1}",
                    "first": began,
                    "middle": sizes[0],
                    "last": sizes[-1],
                    "requests": half[-1].num_requests - half[0].num_requests,
                    _SLOPE: 1000 * slope,
                }
            )
    return rows
