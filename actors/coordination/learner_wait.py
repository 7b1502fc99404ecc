"""Wait of the learner group for resources of the cluster, for status and run log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from actors.coordination.reporting.status import SILENT_S
from actors.learner_room import missing_room
from actors.spec import RunSpec

_ASK_TIMEOUT_S = 5.0


class LearnerWait:
    """Observer of a learner group that Ray Train cannot place."""

    def __init__(self, spec: RunSpec, on_wait: Callable[[str], None]) -> None:
        """Observe a run. `on_wait` receives one message for each wait."""
        self._spec, self._on_wait = spec, on_wait
        self._down_since: float | None = None
        self._missing, self._is_told = "", False

    async def check(self, *, is_down: bool) -> None:
        """Find out what the learner waits for, if it `is_down`. To be called every few seconds."""
        if not is_down:
            self._down_since, self._missing, self._is_told = None, "", False
            return
        self._down_since = time.monotonic() if self._down_since is None else self._down_since
        if time.monotonic() - self._down_since < SILENT_S:
            return
        try:
            # In a thread, as Ray's call blocks.
            self._missing = await asyncio.wait_for(asyncio.to_thread(missing_room, self._spec), _ASK_TIMEOUT_S)
        except TimeoutError:
            return
        if self._missing and not self._is_told:
            self._is_told = True
            self._on_wait(f"the learner waits for {self._missing}{self._outlook()}")

    def texts(self) -> list[str]:
        """Return a sentence about the current wait; none if there is none."""
        if not self._missing or self._down_since is None:
            return []
        return [f"learner waits {time.monotonic() - self._down_since:.0f} s for {self._missing}{self._outlook()}"]

    def _outlook(self) -> str:
        least, most = self._spec.learner_sizes[-1], self._spec.learner.num_workers
        if least == most:
            return ""
        return f"; after {self._spec.learner.resource_timeout_s:g} s it goes on with fewer workers, at least {least}"
