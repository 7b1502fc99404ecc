"""Liveness monitoring: silent actors are reported after seconds, and ended before they cost minutes.

A process that is stopped, that swaps, or whose machine hangs keeps its connections open, so that Ray does not notice.
Actors of the pools, the weight store and Ray Train's controller are probed. Ranks of the learner, which only Ray Train
calls, send heartbeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.coordination.reporting.status import HUNG_S, SILENT_S

START_S = 900.0
"""As `HUNG_S`, for an actor that has not answered since it (re)started: it may be loading a policy."""
PROBE_EVERY_S = 3.0

Probe = Callable[[Any], Awaitable[int | None]]
"""Probes an actor. Returns the id of its process where restarts are counted, else None."""


async def ready(actor: Any) -> int | None:
    """Call an actor's `ready`, in its concurrency group `liveness`. Raises RayError."""
    # Without retries: Ray would repeat the call after a restart, which must be noticed.
    process: int = await actor.ready.options(concurrency_group="liveness", max_task_retries=0).remote()
    return process


@dataclass(slots=True)
class _ActorLiveness:
    actor: Any
    heard_at: float
    is_up: bool
    """Whether it has answered since it (re)started: one that is still loading a policy is not hung."""
    has_answered: bool = False
    """Whether it has ever answered: if not, the cluster may have no room for it."""
    process: int | None = None
    """Id of the process that answered last."""
    num_restarts: int = 0
    """How often another process answered than before."""
    hung_s: float = HUNG_S
    """Seconds without an answer after which it is ended, once it has answered."""


class LivenessMonitor:
    """Liveness monitor of named actors. Runs in an event loop; `silent` may be called at any time."""

    def __init__(self, on_hung: Callable[[str, Any, float], None], now: Callable[[], float] = time.monotonic) -> None:
        """Begin without actors. `on_hung` receives name, handle and seconds of silence of an actor to be ended."""
        self._on_hung, self._now = on_hung, now
        self._actors: dict[str, _ActorLiveness] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._swept_at = now()

    def probe(
        self, name: str, actor: Any, probe: Probe = ready, hung_s: float = HUNG_S, *, is_up: bool = False
    ) -> None:
        """Probe an actor periodically from now on. With `is_up` it is known to have started already."""
        self._actors[name] = _ActorLiveness(
            actor=actor, heard_at=self._now(), is_up=is_up, has_answered=is_up, hung_s=hung_s
        )
        task = asyncio.get_running_loop().create_task(self._follow(name, probe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def record_heartbeat(self, name: str, actor: Any) -> None:
        """Record a heartbeat."""
        self._actors[name] = _ActorLiveness(actor=actor, heard_at=self._now(), is_up=True, has_answered=True)

    def is_watched(self, name: str) -> bool:
        """Whether an actor of that name is monitored."""
        return name in self._actors

    def forget(self, *names: str) -> None:
        """Stop monitoring actors that have ended or are about to be replaced."""
        for name in names:
            self._actors.pop(name, None)

    def silent(self) -> dict[str, float]:
        """Return the seconds of silence of each actor that has been silent for more than `SILENT_S`."""
        return {name: age for name in self._actors if (age := self._age(name)) > SILENT_S}

    def starting(self) -> set[str]:
        """Return the monitored actors that have never answered."""
        return {name for name, liveness in self._actors.items() if not liveness.has_answered}

    def num_restarts(self) -> dict[str, int]:
        """Return how often each probed actor has answered from another process than before, where that is not 0."""
        return {name: liveness.num_restarts for name, liveness in self._actors.items() if liveness.num_restarts}

    def sweep(self) -> None:
        """Pass hung actors to `on_hung`. To be called every `PROBE_EVERY_S` seconds, or more often."""
        self._discount_stall()
        for name, liveness in list(self._actors.items()):
            # `on_hung` may forget others.
            if self._actors.get(name) is not liveness:
                continue
            seconds = self._age(name)
            if seconds > (liveness.hung_s if liveness.is_up else START_S):
                # Its replacement has to start first.
                liveness.is_up, liveness.heard_at = False, self._now()
                self._on_hung(name, liveness.actor, seconds)

    def _discount_stall(self) -> None:
        """Discount time in which this process itself stood still, and could not receive answers."""
        now = self._now()
        away_s, self._swept_at = now - self._swept_at, now
        if away_s > 2 * PROBE_EVERY_S:
            for liveness in self._actors.values():
                liveness.heard_at = min(now, liveness.heard_at + away_s)

    def _age(self, name: str) -> float:
        return self._now() - self._actors[name].heard_at

    async def _follow(self, name: str, probe: Probe) -> None:
        liveness = self._actors[name]
        # An actor that was forgotten and added again has another such task.
        while self._actors.get(name) is liveness:
            try:
                process = await probe(liveness.actor)
            except RayError:
                # It died: when it answers again, it has restarted.
                liveness.is_up = False
            else:
                liveness.heard_at, liveness.is_up, liveness.has_answered = self._now(), True, True
                liveness.num_restarts += liveness.process not in (None, process)
                liveness.process = process
            await asyncio.sleep(PROBE_EVERY_S)
