"""Speed of the service against its bare sampler: throughput and the gain of batching.

A random policy of LLaDA's architecture answers 32 tokens in 32 denoise steps, with one engine on one thread. The
sampler in this process and the service's clients alternate, so that both see the same machine load. Closed loop: each
client sends its next request after an answer. Open loop: requests at a fixed rate, independent of the answers; latency
counts from a request's due time.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.service.deployment import ROLES, Deployed, cpu_s
from benchmarks.service.load import Answer, Ask, Client, Judge, for_seconds
from benchmarks.service.table import percentile, show, times, verdict
from rollout.request import Request
from rollout.sampler import Sampler

_LEAST_GAIN = 3.0
_OPEN_SHARES = (0.5, 0.8)
_PROMPT = "What is 2 + 3?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Amount of measurement."""

    seconds: float = 5.0
    """Duration of each measurement in a round."""
    num_rounds: int = 4
    num_clients: int = 16


@dataclass(slots=True)
class Series:
    """One measurement over all rounds."""

    total_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Latency to the first committed block, of streams."""
    num_tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)
    """Requests per second in each round."""
    cpu_s: Counter[str] = field(default_factory=Counter)
    """CPU seconds by role, which do not depend on other load of the machine."""

    def add(self, answers: list[Answer], seconds: float, cpu_s: dict[str, float]) -> None:
        """Add the answers of one round."""
        lost = [answer.failure or answer.truncation for answer in answers if answer.failure or answer.truncation]
        if lost:
            raise RuntimeError(f"{len(lost)} of {len(answers)} requests were not answered: {lost[0]}")
        self.total_s += [answer.total_s for answer in answers]
        self.first_s += [answer.to_first_s for answer in answers if answer.first_s]
        self.num_tokens += sum(answer.num_tokens for answer in answers)
        self.seconds += seconds
        self.rates.append(len(answers) / seconds)
        self.cpu_s.update(cpu_s)

    def cpu_ms(self, role: str) -> float:
        """Return a role's CPU milliseconds per request."""
        return 1e3 * self.cpu_s[role] / len(self.total_s)

    def row(self, name: str) -> dict[str, Any]:
        """Format for the table."""
        first = times(self.first_s) if self.first_s else {"p50_ms": "", "p99_ms": ""}
        return {
            "measurement": name,
            "n": len(self.total_s),
            "requests/s": len(self.total_s) / self.seconds,
            "tokens/s": self.num_tokens / self.seconds,
            "first block p50_ms": first["p50_ms"],
            "first block p99_ms": first["p99_ms"],
            **{f"end {name}": value for name, value in times(self.total_s).items()},
            **{f"{role} CPU ms": self.cpu_ms(role) for role in ROLES},
        }


async def run(service: Deployed, plan: Plan) -> tuple[dict[str, Any], bool]:
    """Run the benchmark and print it. Returns the results for JSON, and True: a lost answer raises."""
    return report(plan, await measure(service, plan)), True


async def measure(service: Deployed, plan: Plan) -> dict[str, Series]:
    """Run all measurements. The open loops run last, at fractions of the measured closed-loop rate."""
    whole, streamed = _ask(service, is_streamed=False), _ask(service, is_streamed=True)
    sampler = service.policies.sampler(service.policies.newest)
    requests = Judge(service.policies).requests(whole)
    found: dict[str, Series] = {}
    async with aclosing(Client(service.url)) as client:
        for ask in (whole, streamed):
            await client.closed_loop([ask], plan.num_clients, for_seconds(1.0))
        for _ in range(plan.num_rounds):
            for num_rows in (1, plan.num_clients):
                series = found.setdefault(f"sampler alone, rows: {num_rows}", Series())
                _sample(series, sampler, requests[0], whole, num_rows=num_rows, seconds=plan.seconds)
            for num_clients in (1, plan.num_clients):
                for ask, name in ((whole, ""), (streamed, ", streamed")):
                    series = found.setdefault(f"closed loop, clients: {num_clients}{name}", Series())
                    began, before = time.perf_counter(), cpu_s()
                    answers = await client.closed_loop([ask], num_clients, for_seconds(plan.seconds))
                    series.add(answers, time.perf_counter() - began, _since(before))
        many = found[f"closed loop, clients: {plan.num_clients}"]
        for share in _OPEN_SHARES:
            rate = share * len(many.total_s) / many.seconds
            began, before = time.perf_counter(), cpu_s()
            answers = await client.open_loop([whole, streamed], rate, for_seconds(plan.seconds * plan.num_rounds))
            name = f"open loop at {100 * share:.0f} % of {1 / share * rate:.1f}/s, half streamed"
            found.setdefault(name, Series()).add(answers, time.perf_counter() - began, _since(before))
    return found


def _ask(service: Deployed, *, is_streamed: bool) -> Ask:
    shape = service.policies.shape
    diffusion: dict[str, Any] = {
        "gen_length": shape.gen_length,
        "block_length": shape.block_length,
        "steps": shape.steps,
    }
    # Forbid end of text, so that all completions have equal length.
    diffusion |= {"constraints": {"forbidden_ids": [service.policies.eos_id]}}
    return Ask(body={"prompt": _PROMPT, "seed": 0, "diffusion": diffusion}, is_streamed=is_streamed)


def _since(before: dict[str, float]) -> dict[str, float]:
    return {role: now - before[role] for role, now in cpu_s().items()}


def _sample(series: Series, sampler: Sampler, request: Request, ask: Ask, *, num_rows: int, seconds: float) -> None:
    """Run the in-process sampler repeatedly with `num_rows` rows for `seconds`."""
    answers: list[Answer] = []
    began, cpu_began = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        answers += _sampled(sampler, request, ask, num_rows=num_rows)
    series.add(answers, time.perf_counter() - began, {"engine": time.process_time() - cpu_began})


def _sampled(sampler: Sampler, request: Request, ask: Ask, *, num_rows: int) -> list[Answer]:
    """Run the in-process sampler once with `num_rows` rows, and return them as answers to `ask`."""
    start_s, first_s = time.perf_counter(), 0.0
    batch = sampler.open([request] * num_rows, max_rows=num_rows)
    done: list[Any] = []
    while len(done) < num_rows:
        done += batch.step()
        if not first_s and (done or any(batch.num_committed().values())):
            first_s = time.perf_counter()
    ended_s = time.perf_counter()
    return [
        Answer(ask=ask, began_s=start_s, first_s=first_s, ended_s=ended_s, num_tokens=completion.num_tokens)
        for _, completion in done
    ]


def report(plan: Plan, found: dict[str, Series]) -> dict[str, Any]:
    """Print the measurements next to their limits. Returns them for JSON."""
    rows = [series.row(name) for name, series in found.items()]
    show("speed, one engine", rows)
    alone, one = found["sampler alone, rows: 1"], found["closed loop, clients: 1"]
    batch, many = found[f"sampler alone, rows: {plan.num_clients}"], found[f"closed loop, clients: {plan.num_clients}"]
    gain = _paired(many, one)
    checks = [
        verdict(f"throughput, {plan.num_clients} clients / 1", gain, f">= {_LEAST_GAIN}", is_met=gain >= _LEAST_GAIN),
    ]
    show("limits", checks)
    bound, cpu_bound = _paired(batch, alone), alone.cpu_ms("engine") / batch.cpu_ms("engine")
    print(
        f"  the sampler alone, {plan.num_clients} rows / 1, bounds the last: {bound:.2f}, {cpu_bound:.2f} of CPU time"
    )
    return {
        "plan": asdict(plan),
        "rows": rows,
        "checks": checks,
        "bound_of_gain": bound,
        "cpu_bound_of_gain": cpu_bound,
    }


def _paired(many: Series, one: Series) -> float:
    """Compute the median of the per-round rate ratios."""
    return percentile([a / b for a, b in zip(many.rates, one.rates, strict=True)], 0.5)
