"""Liveness: which actors of a run do not answer, said after seconds and ended before they cost minutes.

A process that was stopped, that swaps, or whose machine hangs keeps its connections open, so that nobody is told.
Actors of the pools, the weight store and Ray Train's controller are asked; ranks of the learner, whom only Ray Train
calls, send heartbeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.coordination.status import HUNG_S, SILENT_S

START_S = 900.0
"""The same of an actor that has not answered since it (re)started: it may be loading a policy."""
PROBE_EVERY_S = 3.0

Probe = Callable[[Any], Awaitable[int | None]]
"""Asks an actor for a sign of life: the id of its process, where who takes its place is to be told from it."""


async def ready(actor: Any) -> int | None:
    """Ask an actor's `ready`, in its concurrency group `liveness`. Raises RayError."""
    # Ray would repeat it after a restart, which is to be known.
    process: int = await actor.ready.options(concurrency_group="liveness", max_task_retries=0).remote()
    return process


@dataclass(slots=True)
class _Pulse:
    actor: Any
    heard_at: float
    is_up: bool
    """It has answered since it (re)started: who is still loading a policy is not hung."""
    has_answered: bool = False
    """Whether it ever has: else there may be no place for it."""
    process: int | None = None
    """The process that answered last."""
    num_restarts: int = 0
    """How often another one did."""
    hung_s: float = HUNG_S
    """Seconds without an answer after which it is ended, once it has answered."""


class Watch:
    """The liveness of named actors. Runs in an event loop; `silent` may be asked at any time."""

    def __init__(self, on_hung: Callable[[str, Any, float], None], now: Callable[[], float] = time.monotonic) -> None:
        """`on_hung` is given the name, the handle and the seconds of silence of an actor that has to be ended."""
        self._on_hung, self._now = on_hung, now
        self._pulses: dict[str, _Pulse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._swept_at = now()

    def ask(self, name: str, actor: Any, probe: Probe = ready, hung_s: float = HUNG_S) -> None:
        """Probe an actor again and again from now on."""
        self._pulses[name] = _Pulse(actor=actor, heard_at=self._now(), is_up=False, hung_s=hung_s)
        task = asyncio.get_running_loop().create_task(self._follow(name, probe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def heard(self, name: str, actor: Any) -> None:
        """A heartbeat came."""
        self._pulses[name] = _Pulse(actor=actor, heard_at=self._now(), is_up=True, has_answered=True)

    def is_watched(self, name: str) -> bool:
        """Whether an actor of that name is."""
        return name in self._pulses

    def forget(self, *names: str) -> None:
        """These have ended, or are about to be replaced."""
        for name in names:
            self._pulses.pop(name, None)

    def silent(self) -> dict[str, float]:
        """Seconds of silence of each actor that has been silent for more than `SILENT_S`."""
        return {name: age for name in self._pulses if (age := self._age(name)) > SILENT_S}

    def starting(self) -> set[str]:
        """Who of those that are asked has not answered yet."""
        return {name for name, pulse in self._pulses.items() if not pulse.has_answered}

    def num_restarts(self) -> dict[str, int]:
        """How often each actor that is asked has answered from another process than before, where that is not 0."""
        return {name: pulse.num_restarts for name, pulse in self._pulses.items() if pulse.num_restarts}

    def sweep(self) -> None:
        """End the actors that are hung. To be called every `PROBE_EVERY_S` seconds, or more often."""
        self._allow_for_our_own_silence()
        for name, pulse in list(self._pulses.items()):
            seconds = self._age(name)
            if seconds > (pulse.hung_s if pulse.is_up else START_S):
                # What takes its place has to come up first.
                pulse.is_up, pulse.heard_at = False, self._now()
                self._on_hung(name, pulse.actor, seconds)

    def _allow_for_our_own_silence(self) -> None:
        """Where it was this process that stood still, nobody could be heard."""
        now = self._now()
        away_s, self._swept_at = now - self._swept_at, now
        if away_s > 2 * PROBE_EVERY_S:
            for pulse in self._pulses.values():
                pulse.heard_at = min(now, pulse.heard_at + away_s)

    def _age(self, name: str) -> float:
        return self._now() - self._pulses[name].heard_at

    async def _follow(self, name: str, probe: Probe) -> None:
        pulse = self._pulses[name]
        # Forgotten and asked again, it is followed by another.
        while self._pulses.get(name) is pulse:
            try:
                process = await probe(pulse.actor)
            except RayError:
                # It died: it is new when it answers again.
                pulse.is_up = False
            else:
                pulse.heard_at, pulse.is_up, pulse.has_answered = self._now(), True, True
                pulse.num_restarts += pulse.process not in (None, process)
                pulse.process = process
            await asyncio.sleep(PROBE_EVERY_S)
