"""Overhead of Ray Serve: a request through its proxy, the ingress and a handle, against a direct call of the engine.

The engine in this process and the service's engine run the same job in turn, so that both see the same machine load.
With one denoise step per block the computation adds the least noise. CPU time does not depend on the machine's load.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.service.deployment import ROLES, Deployed, cpu_s
from benchmarks.service.load import Ask, Client, Judge
from benchmarks.service.table import percentile, show, verdict
from deploy.service.contract import Job
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.source import Source

_ANSWER_MS = 1100.0
"""An answer of LLaDA-8B (docs/benchmarks.md)."""
_MOST_SHARE = 0.03
_NUM_WARM_UPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Amount of measurement."""

    num_pairs: int = 100
    """Pairs of a direct call and a request, streamed and not."""


@dataclass(slots=True)
class Pairs:
    """Latencies of direct calls and of the requests after them, in seconds."""

    direct_s: list[float] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    cpu_s: Counter[str] = field(default_factory=Counter)
    """CPU seconds of the requests by role."""

    @property
    def overhead_ms(self) -> float:
        """Median of the paired differences, in milliseconds."""
        return 1e3 * percentile([served - direct for direct, served in self._both()], 0.5)

    def row(self, name: str) -> dict[str, Any]:
        """Format for the table."""
        ratio = percentile([served / direct for direct, served in self._both()], 0.5)
        cpu = {f"{role} CPU ms": 1e3 * self.cpu_s[role] / len(self.served_s) for role in ROLES}
        return {"request": name, "n": len(self.served_s), "overhead_ms": self.overhead_ms, "ratio": ratio} | cpu

    def _both(self) -> list[tuple[float, float]]:
        return list(zip(self.direct_s, self.served_s, strict=True))


async def run(service: Deployed, plan: Plan) -> tuple[dict[str, Any], bool]:
    """Run the benchmark and print it. Returns the results for JSON, and whether the overhead is within the limit."""
    policies = service.policies
    versions = Source(directory=str(policies.directory), is_run=True, registry_url=None).versions("cpu")
    engine = Engine(versions)
    host = EngineHost(versions, engine)
    shape = policies.shape
    num_blocks = shape.gen_length // shape.block_length
    diffusion: dict[str, Any] = {
        "gen_length": shape.gen_length,
        "block_length": shape.block_length,
        "steps": num_blocks,
    }
    # Forbid end of text, so that all completions have equal length.
    diffusion |= {"constraints": {"forbidden_ids": [policies.eos_id]}}
    body = {"prompt": "What is 2 + 3?", "seed": 0, "diffusion": diffusion}
    whole, streamed = (Ask(body=body, is_streamed=is_streamed) for is_streamed in (False, True))
    found = {"whole": Pairs(), "streamed": Pairs()}
    requests = tuple(Judge(policies).requests(whole)[:1])
    try:
        async with aclosing(Client(service.url)) as client:
            for _ in range(_NUM_WARM_UPS):
                await client.ask(streamed)
            for _ in range(plan.num_pairs):
                for ask, pairs in zip((whole, streamed), found.values(), strict=True):
                    job = Job(requests=dict(enumerate(requests)), wanted="policy", tells_blocks=ask.is_streamed)
                    pairs.direct_s.append(await _direct_s(host, job))
                    before, answer = cpu_s(), await client.ask(ask)
                    if answer.failure or answer.truncation:
                        raise RuntimeError(f"a request was not answered: {answer.failure or answer.truncation}")
                    pairs.served_s.append(answer.total_s)
                    pairs.cpu_s.update({role: now - before[role] for role, now in cpu_s().items()})
    finally:
        engine.close()
    return _report(plan, found, num_blocks)


async def _direct_s(host: EngineHost, job: Job) -> float:
    """Run a job in this process. Returns its seconds."""
    began_s = time.perf_counter()
    async with aclosing(host.stream(job)) as stream:
        async for _ in stream:
            pass
    return time.perf_counter() - began_s


def _report(plan: Plan, found: dict[str, Pairs], num_blocks: int) -> tuple[dict[str, Any], bool]:
    rows = [pairs.row(name) for name, pairs in found.items()]
    show(f"overhead of a request with {num_blocks} blocks, one at a time", rows)
    per_block_ms = (found["streamed"].overhead_ms - found["whole"].overhead_ms) / num_blocks
    print(f"  each streamed block: {per_block_ms:.2f} ms")
    limit_ms = _MOST_SHARE * _ANSWER_MS
    checks = [
        verdict(f"overhead, {name}, ms", pairs.overhead_ms, f"<= {limit_ms:.0f}", is_met=pairs.overhead_ms <= limit_ms)
        for name, pairs in found.items()
    ]
    show("limits", checks)
    result = {"plan": asdict(plan), "rows": rows, "per_block_ms": per_block_ms, "checks": checks}
    return result, all(check["met"] == "yes" for check in checks)
