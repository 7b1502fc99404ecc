"""Fault injection: version swaps and engine kills under load. No answer may be lost.

Closed-loop clients send requests while versions are published and engines are killed, one at a time. Parts with and
without disturbance alternate on the same deployment and are equally long, so that both see the same machine load.
Afterwards every answer is compared with the output of its version's sampler in this process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.service.deployment import ENGINE, Deployed, kill, processes
from benchmarks.service.load import Answer, Ask, Client, Judge, Verdict, for_seconds, mixed_asks
from benchmarks.service.table import show, times, verdict

_LIMIT = 1.3
_NUM_ASKS = 32
_BACK_TIMEOUT_S = 300.0
_POLL_S = 0.25
_WARM_UP_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Load and disturbances of the service."""

    num_swaps: int = 100
    num_kills: int = 20
    num_parts: int = 5
    """Parts with disturbance. Each is followed by an equally long part without."""
    num_clients: int = 4
    """Closed-loop clients: each sends its next request after an answer."""
    rate: float = 0.0
    """Requests per second of an open loop. 0: use the closed-loop clients."""
    swap_every_s: float = 9.0
    """Mean interval between swaps."""
    kill_after_s: float = 45.0
    """Mean time from the recovery of all engines to the next kill."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Results of the disturbed and undisturbed parts."""

    calm: list[Answer] = field(default_factory=list)
    disturbed: list[Answer] = field(default_factory=list)
    kills_s: list[tuple[float, float]] = field(default_factory=list)
    """Times of each kill and of the following recovery of all engines, by `time.perf_counter`."""
    num_swaps: int = 0
    seconds: float = 0.0
    """Total length of the disturbed parts, equal to that of the others."""

    @property
    def summary(self) -> str:
        """Summarise the disturbances so far."""
        return f"{self.num_swaps} swaps, {len(self.kills_s)} kills, {len(self.disturbed)} answers"


async def run(service: Deployed, plan: Plan) -> tuple[dict[str, Any], bool]:
    """Run the benchmark and print it. Returns the results for JSON, and whether no answer was lost."""
    return report(service, plan, await disturb(service, plan))


async def disturb(service: Deployed, plan: Plan, *, compares: bool = True) -> Outcome:
    """Run all parts, those without disturbance only if `compares`."""
    asks = mixed_asks(service.policies, _NUM_ASKS, plan.seed)
    async with aclosing(Client(service.url)) as client:
        trouble = _Trouble(service, client, plan)
        await all_back(client, service)
        await _load(client, asks, plan, for_seconds(_WARM_UP_S))
        for part in range(plan.num_parts):
            task, began = asyncio.create_task(trouble.make(part)), time.perf_counter()
            trouble.outcome.disturbed += await _load(client, asks, plan, _until(task))
            await task
            seconds = time.perf_counter() - began
            trouble.outcome.seconds += seconds
            print(f"  part {part + 1} of {plan.num_parts}: {trouble.outcome.summary}", flush=True)
            if compares:
                trouble.outcome.calm += await _load(client, asks, plan, for_seconds(seconds))
    return trouble.outcome


async def _load(client: Client, asks: Sequence[Ask], plan: Plan, goes_on: Callable[[], bool]) -> list[Answer]:
    if plan.rate:
        return await client.open_loop(asks, plan.rate, goes_on)
    return await client.closed_loop(asks, plan.num_clients, goes_on)


def _until(task: asyncio.Task[None]) -> Callable[[], bool]:
    return lambda: not task.done()


class _Trouble:
    """Concurrent swaps and kills at independent random times."""

    def __init__(self, service: Deployed, client: Client, plan: Plan) -> None:
        self._service, self._client, self._plan = service, client, plan
        self._swap_draw, self._kill_draw = random.Random(plan.seed), random.Random(plan.seed + 1)
        self.outcome = Outcome()

    async def make(self, part: int) -> None:
        """Run the swaps and kills of a part."""
        plan = self._plan
        num_swaps, num_kills = (
            total * (part + 1) // plan.num_parts - total * part // plan.num_parts
            for total in (plan.num_swaps, plan.num_kills)
        )
        await asyncio.gather(self._swap(num_swaps), self._kill(num_kills))

    async def _swap(self, num_swaps: int) -> None:
        for _ in range(num_swaps):
            await asyncio.sleep(self._swap_draw.uniform(0.0, 2 * self._plan.swap_every_s))
            await asyncio.to_thread(self._service.publisher.publish)
            self.outcome.num_swaps += 1

    async def _kill(self, num_kills: int) -> None:
        """Kill engines, each after all have recovered from the previous kill."""
        for _ in range(num_kills):
            await asyncio.sleep(self._kill_draw.uniform(0.0, 2 * self._plan.kill_after_s))
            killed_s, victim = time.perf_counter(), self._kill_draw.choice(sorted(processes(ENGINE)))
            kill(victim)
            await all_back(self._client, self._service, without=victim)
            self.outcome.kills_s.append((killed_s, time.perf_counter()))


async def all_back(client: Client, service: Deployed, without: int | None = None) -> None:
    """Wait until every engine answers, excluding the process that was killed."""
    deadline, num_all = time.monotonic() + _BACK_TIMEOUT_S, service.policies.num_replicas
    while True:
        pids = await asyncio.to_thread(processes, ENGINE)
        if len(pids - {without}) >= num_all and await client.num_engines() >= num_all:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {num_all} engines answered for {_BACK_TIMEOUT_S:.0f} s")
        await asyncio.sleep(_POLL_S)


def report(service: Deployed, plan: Plan, outcome: Outcome) -> tuple[dict[str, Any], bool]:
    """Print the results. Returns them for JSON, and whether no answer was lost."""
    judge = Judge(service.policies)
    found = {"undisturbed": judge.judge(outcome.calm), "disturbed": judge.judge(outcome.disturbed)}
    rows = [
        _row(name, answers, found[name])
        for name, answers in (("undisturbed", outcome.calm), ("disturbed", outcome.disturbed))
    ]
    load = f"{plan.rate:g} requests/s" if plan.rate else f"{plan.num_clients} clients"
    who = f"{load}, {service.policies.num_replicas} engines"
    show(f"{outcome.summary} in {outcome.seconds:.0f} s, {who}", rows)
    near = [_row(name, answers, None) for name, answers in _by_trouble(outcome).items() if answers]
    show("the disturbed answers", near)
    for name, one in found.items():
        for why in [*one.failed, *one.truncated, *one.mixed][:5]:
            print(f"  {name}: {why}")
    ratio = rows[1]["p99_ms"] / rows[0]["p99_ms"]
    lost = sum(row["failed"] + row["truncated"] + row["mixed"] for row in rows)
    back = [there - killed for killed, there in outcome.kills_s]
    checks = [
        verdict("failed, truncated or mixed answers", lost, "0", is_met=not lost),
        verdict("p99 disturbed / undisturbed", ratio, f"<= {_LIMIT}", is_met=ratio <= _LIMIT),
    ]
    show("limits", checks)
    print(f"  an engine was back after {sum(back) / max(1, len(back)):.1f} s on average")
    result = {"plan": asdict(plan), "rows": rows, "disturbed": near, "checks": checks, "engine_back_s": back}
    return result, not lost


def _row(name: str, answers: list[Answer], found: Verdict | None) -> dict[str, Any]:
    row: dict[str, Any] = {"answers": name, "n": len(answers)} | times([one.total_s for one in answers])
    if found is None:
        return row
    return row | {"failed": len(found.failed), "truncated": len(found.truncated), "mixed": len(found.mixed)}


def _by_trouble(outcome: Outcome) -> dict[str, list[Answer]]:
    """Group answers: in flight at a kill, during a recovery, and at other times."""
    parts: dict[str, list[Answer]] = {"at a kill": [], "with an engine away": [], "otherwise": []}
    for answer in outcome.disturbed:
        if any(answer.began_s <= killed <= answer.ended_s for killed, _ in outcome.kills_s):
            parts["at a kill"].append(answer)
        elif any(answer.ended_s > killed and answer.began_s < there for killed, there in outcome.kills_s):
            parts["with an engine away"].append(answer)
        else:
            parts["otherwise"].append(answer)
    return parts
