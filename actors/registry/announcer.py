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
from actors.run_log import RunLog, began_at
from actors.spec import Phase


class Announcer:
    """Tells the registry of one run; what fails is recorded."""

    def __init__(self, registry: Registry, log: RunLog, run_dir: Path, store_name: str) -> None:
        """`store_name` is the Ray name of the run's weight store."""
        self._registry, self._log = registry, log
        self._run_dir, self._store_name = run_dir, store_name
        self._is_away = False

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
        knew_any = await self._tell(self._registry.announce, version, began_at(self._log.events_since(0)))
        if knew_any is False:
            # New, or Redis has lost its data: the registry gets what the run directory says.
            await self._tell(rebuild, self._registry, self._run_dir)

    async def checkpoint(self, version: int, directory: Path) -> None:
        """A version's weights lie in a directory too."""
        await self._tell(self._registry.add_checkpoint, version, str(directory))

    async def score(self, version: int, num_correct: int, num_problems: int) -> None:
        """A version was evaluated."""
        await self._tell(self._registry.score, version, num_correct, num_problems)

    async def best(self) -> None:
        """Validation problems were asked: another version may be the best now."""
        version = validated_best(self._log.events_since(0))
        if version is not None:
            await self._tell(self._registry.choose_best, version)

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
