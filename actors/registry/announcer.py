"""What the registry, and so the service, is told of a run's versions; nobody waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from actors.checkpoints.best import validated_best
from actors.messages import Generation
from actors.registry.files import read_admin, rebuild
from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import VALIDATION, RunLog, began_at
from actors.spec import Phase

# The registry answers in a millisecond or two. Until then a version's publisher waits, and so says it again where this
# process dies meanwhile.
_PATIENCE_S = 2.0


class Announcer:
    """Tells the registry of one run, one thing after another, in a task of its own. It is never the only copy.

    While the registry is away, what it is to hear waits; an outage is one failure, however long it is. What it refuses
    is recorded, and filled in from the run directory with the next version, as is what a process before this one may
    have left untold.
    """

    def __init__(self, registry: Registry, log: RunLog, run_dir: Path, store_name: str) -> None:
        """`store_name` is the Ray name of the run's weight store."""
        self._registry, self._log = registry, log
        self._run_dir, self._store_name = run_dir, store_name
        self._lacks_history, self._is_away = True, False
        self._untold: deque[Callable[[], Any]] = deque()
        self._telling: asyncio.Task[None] | None = None

    async def announce(self, generation: Generation, phase: Phase, round_index: int) -> bool:
        """The store has a version. Whether the registry was told of it."""
        call = self._announcement(generation, phase, round_index)
        telling = self._tell(call)
        if not self._is_away:
            await asyncio.wait((telling,), timeout=_PATIENCE_S)
        return telling.done() and call not in self._untold

    def remember(self, generation: Generation, phase: Phase, round_index: int) -> None:
        """A process before this one had not told of the newest version: it is told before all else. A registry that
        has heard of it meanwhile hears nothing new."""
        self._untold.append(self._announcement(generation, phase, round_index))

    def checkpoint(self, version: int, directory: Path) -> None:
        """A version's weights lie in a directory too."""
        self._tell(partial(self._registry.add_checkpoint, version, str(directory)))

    def evaluated(self, version: int, label: str, num_correct: int, num_problems: int) -> None:
        """A version was evaluated; where validation problems were asked, another may be the best now."""
        self._tell(partial(self._registry.score, version, num_correct, num_problems))
        best = validated_best(self._log.events_since(0)) if label == VALIDATION else None
        if best is not None:
            self._tell(partial(self._registry.choose_best, best))

    def go_on(self) -> None:
        """Try again to tell what is untold. To be called again and again."""
        if self._untold:
            self._begin()

    async def settled(self) -> None:
        """Everything is told, or was tried once more; what is left is recorded."""
        if self._telling is not None:
            await self._telling
        if self._lacks_history:
            self._untold.append(self._fill)
        if self._untold:
            await self._begin()
        if self._untold:
            what = "the registry is still away, and was not told all that the run directory has"
            self._log.append("failure", what=what, attempt=1)

    def pinned(self) -> int | None:
        """The version that an operator holds on to."""
        try:
            return read_admin(self._run_dir).pinned
        except ValueError as error:
            self._note_failure(error)
            return None

    def _announcement(self, generation: Generation, phase: Phase, round_index: int) -> Callable[[], None]:
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
        return partial(self._announce, version, began_at(self._log.events_since(0)))

    def _announce(self, version: PolicyVersion, run_began_at: float | None) -> None:
        # It knew none where it is new, or where Redis has lost its data.
        self._lacks_history |= not self._registry.announce(version, run_began_at)
        if self._lacks_history:
            self._fill()

    def _fill(self) -> None:
        try:
            rebuild(self._registry, self._run_dir)
        except ValueError:
            self._lacks_history = False  # All but what the operator wants is filled in.
            raise
        self._lacks_history = False

    def _tell(self, call: Callable[[], Any]) -> asyncio.Task[None]:
        self._untold.append(call)
        return self._begin()

    def _begin(self) -> asyncio.Task[None]:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all())
        return self._telling

    async def _tell_all(self) -> None:
        """Until nothing is left, or the registry is away."""
        while self._untold:
            call = self._untold.popleft()
            try:
                await asyncio.to_thread(call)
            except ConnectionError as error:
                if not await self._is_up():
                    self._untold.appendleft(call)
                    self._note_outage(error)
                    return
                # It refuses this very thing.
                self._lacks_history = True
                self._note_failure(error)
            except Exception as error:  # Else what comes after it would not be told, and nobody would hear of it.
                self._note_failure(error)
            self._is_away = False

    async def _is_up(self) -> bool:
        try:
            await asyncio.to_thread(self._registry.ping)
        except ConnectionError:
            return False
        return True

    def _note_outage(self, error: ConnectionError) -> None:
        if not self._is_away:
            self._note_failure(error)
        self._is_away = True

    def _note_failure(self, error: Exception) -> None:
        said = isinstance(error, ConnectionError | ValueError)
        self._log.append("failure", what=str(error) if said else f"{type(error).__name__}: {error}", attempt=1)
