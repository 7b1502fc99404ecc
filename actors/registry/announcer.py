"""What the registry, and so the service, is told of a run's versions. It is never the only copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.checkpoints.best import validated_best
from actors.messages import Generation
from actors.registry.files import read_admin, rebuild
from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import VALIDATION, RunLog, began_at
from actors.spec import Phase


class Announcer:
    """Tells the registry of one run, one thing after another; what fails is recorded."""

    def __init__(self, registry: Registry, log: RunLog, run_dir: Path, store_name: str) -> None:
        """`store_name` is the Ray name of the run's weight store."""
        self._registry, self._log = registry, log
        self._run_dir, self._store_name = run_dir, store_name
        self._is_away = False
        self._turn = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()

    async def settled(self) -> None:
        """Everything is told that nobody waited for."""
        await asyncio.gather(*self._telling)

    async def announce(self, generation: Generation, phase: Phase, round_index: int) -> None:
        """The store has a version."""
        version = PolicyVersion(
            version=generation.version,
            round=round_index,
            phase=phase,
            num_correct=None,
            num_problems=None,
            checkpoint=None,
            weight_store=self._store_name,
            manifest_digest=generation.digest,
        )
        async with self._turn:
            knew_any = await self._tell(self._registry.announce, version, began_at(self._log.events_since(0)))
            if knew_any is False:
                # New, or Redis has lost its data: the registry gets what the run directory says.
                await self._tell(rebuild, self._registry, self._run_dir)

    async def checkpoint(self, version: int, directory: Path) -> None:
        """A version's weights lie in a directory too."""
        async with self._turn:
            await self._tell(self._registry.add_checkpoint, version, str(directory))

    def evaluated(self, version: int, label: str, num_correct: int, num_problems: int) -> None:
        """A version was evaluated; where validation problems were asked, another may be the best now. Nobody waits for
        the registry."""
        best = validated_best(self._log.events_since(0)) if label == VALIDATION else None
        telling = asyncio.create_task(self._evaluated(version, num_correct, num_problems, best))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _evaluated(self, version: int, num_correct: int, num_problems: int, best: int | None) -> None:
        async with self._turn:
            await self._tell(self._registry.score, version, num_correct, num_problems)
            if best is not None:
                await self._tell(self._registry.choose_best, best)

    def pinned(self) -> int | None:
        """The version that an operator holds on to."""
        try:
            return read_admin(self._run_dir).pinned
        except ValueError as error:
            self._log.append("failure", what=str(error), attempt=1)
            return None

    async def _tell(self, call: Callable[..., Any], *facts: Any) -> Any:
        """What `call` returns, or None. An outage is one failure, however often it is met."""
        try:
            answer = await asyncio.to_thread(call, *facts)
        except ConnectionError as error:
            if not self._is_away:
                self._log.append("failure", what=str(error), attempt=1)
            self._is_away = True
        except ValueError as error:
            self._log.append("failure", what=str(error), attempt=1)
        else:
            self._is_away = False
            return answer
        return None
