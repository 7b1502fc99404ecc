"""Rounds in flight: sample and grade their work units concurrently, with retries.

Each attempt at a work unit is an asyncio task. The ledger determines the next one, and records its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray

from actors.coordination.ledger import Ledger
from actors.coordination.pools import Pools, PortionFailedError, VersionLostError
from actors.messages import Generation, PortionKey, PortionSummary
from actors.plan import RunPlan
from actors.spec import RunSpec
from actors.training.choosing import GroupChoice


class OpenRounds:
    """Rounds in flight between the learner's calls. A new instance continues from the next call."""

    def __init__(self, spec: RunSpec, plan: RunPlan, pools: Pools, on_failure: Callable[[str, int], None]) -> None:
        """Begin without rounds. `on_failure` receives what failed, and the number of the attempt."""
        self._spec, self._plan, self._pools, self._on_failure = spec, plan, pools, on_failure
        self._choice = GroupChoice.of(spec)
        self._ledger: Ledger | None = None
        self._generations: dict[int, Generation] = {}
        self._scored: dict[PortionKey, tuple[ray.ObjectRef[Any], PortionSummary]] = {}
        self._teaching: dict[int, dict[int, int]] = {}
        self._tries: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._is_lost = False
        self._last_failure = ""

    @property
    def next_round(self) -> int | None:
        """The first round that is not published; None before the learner has requested one."""
        return None if self._ledger is None else self._ledger.next_round

    @property
    def newest_version(self) -> int:
        """The newest version that the learner has reported."""
        return max(self._generations, default=0)

    @property
    def num_retries(self) -> int:
        """Attempts beyond the first, since the ledger was made."""
        return 0 if self._ledger is None else self._ledger.num_retries

    def counts(self) -> dict[str, int]:
        """Return the number of work units by state."""
        return {} if self._ledger is None else self._ledger.counts()

    def unfinished(self) -> list[PortionKey]:
        """Return the work units of the current round that are neither ready nor failed."""
        return [] if self._ledger is None else self._ledger.unfinished(self._ledger.next_round)

    def forget(self) -> None:
        """Cancel everything in flight, because the learner restarts or the run stops."""
        for attempt in self._tries:
            attempt.cancel()
        self._scored.clear()
        self._teaching.clear()
        self._ledger = None

    def redo(self, round_index: int) -> None:
        """Sample the work units of a round again, because they can no longer be fetched."""
        if self._ledger is not None:
            for key in self._ledger.ready(round_index):
                del self._teaching[round_index][key.index]
            self._ledger.redo(round_index)

    def begin(self, round_index: int, generation: Generation) -> None:
        """Begin a round from `generation`, and start all work units that may run, those of later rounds included."""
        self._ledger = self._ledger_at(round_index, generation)
        self._is_lost = False
        # Not already when the last round was published: what the learner does in between, an evaluation or a
        # checkpoint, is not part of this round, but its sampling is.
        self._start_portions()

    async def complete(self, round_index: int) -> list[ray.ObjectRef[Any]]:
        """Wait until a round that has begun is complete. Returns references of its scored work units.

        They are sampled from the generation that the round began with, or from up to S versions before it.

        Raises:
            VersionLostError: the weight store has lost a version; the learner has to publish first.
            TimeoutError: no result for longer than the timeouts of sampling and grading together, without a pause.
            RuntimeError: every work unit of the round failed, or the learner has restarted.
        """
        ledger = self._ledger
        if ledger is None or ledger.next_round != round_index:
            raise RuntimeError(f"the learner has begun again, and nobody waits for round {round_index} any more")
        await self._wait_for(ledger, round_index)
        ready = ledger.ready(round_index)
        if not ready:
            raise RuntimeError(f"round {round_index} has no completions: all its portions failed. {self._last_failure}")
        return [self._scored[key][0] for key in ready]

    def summaries(self, round_index: int) -> Mapping[PortionKey, PortionSummary] | None:
        """Return summaries of the ready work units of a round; None if a coordinator that died had collected them."""
        if self._ledger is None:
            return None
        return {key: self._scored[key][1] for key in self._ledger.ready(round_index)}

    def publish(self, round_index: int, generation: Generation) -> None:
        """Drop a round that the learner trained on and published as `generation`, and admit the next."""
        self._generations[generation.version] = generation
        if self._ledger is not None:
            for key in self._ledger.ready(round_index):
                del self._scored[key]
            self._teaching.pop(round_index, None)
            self._ledger.publish(round_index, generation.version)

    def _ledger_at(self, round_index: int, generation: Generation) -> Ledger:
        """Return the ledger, a new one after a restart of the learner or of this process."""
        self._generations[generation.version] = generation
        if self._ledger is None or self._ledger.next_round != round_index:
            self._scored.clear()
            self._teaching.clear()
            self._ledger = Ledger(
                num_rounds=self._spec.learner.num_rounds,
                portions_per_round=self._plan.portions_per_round,
                max_staleness=self._spec.learner.max_staleness,
                max_attempts=self._spec.rollout.max_attempts,
                next_round=round_index,
                version=generation.version,
            )
        return self._ledger

    def _note_teaching(self, ledger: Ledger, key: PortionKey, num_groups: int) -> None:
        """Note the number of informative groups of a work unit, and extend the round if there are too few."""
        teaching = self._teaching.setdefault(key.round, {})
        teaching[key.index] = num_groups
        if self._choice.is_dynamic:
            ledger.extend(key.round, self._choice.portions_needed(self._plan.portion_sizes(key.round), teaching))

    async def _wait_for(self, ledger: Ledger, round_index: int) -> None:
        """Wait until a round is complete. Raises VersionLostError and TimeoutError as `complete` does."""
        patience_s = left_s = self._spec.sampling_timeout_s + self._spec.grading_timeout_s
        async with self._changed:
            while not ledger.is_complete(round_index):
                if self._is_lost:
                    raise VersionLostError
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                    left_s = patience_s
                except TimeoutError as error:
                    # Work that resumed after a pause gets the full timeout from the end of the pause.
                    left_s = patience_s - self._pools.unpaused_s
                    if left_s > 0:
                        continue
                    raise TimeoutError(
                        f"round {round_index}: no portion came back for {patience_s:.0f} s "
                        f"({ledger.counts()['running']} running); are all samplers placed?"
                    ) from error

    def _start_portions(self) -> None:
        ledger = self._ledger
        while ledger is not None and not self._is_lost and (started := ledger.start_next()) is not None:
            attempt = asyncio.create_task(self._run(ledger, *started))
            # The event loop keeps only weak references to tasks.
            self._tries.add(attempt)
            attempt.add_done_callback(self._tries.discard)

    async def _run(self, ledger: Ledger, key: PortionKey, version: int) -> None:
        """Run one attempt at a work unit."""
        try:
            make = partial(self._plan.round_portion, key.round, key.index)
            scored = await self._pools.score(self._generations[version], key, make, key.round)
        except VersionLostError as error:
            if not self._is_lost:
                self._on_failure(f"{error}; the learner publishes again", 1)
            self._is_lost = True
            ledger.release(key)
        except Exception as error:  # Otherwise the error would be lost, and the round would never complete.
            what = str(error) if isinstance(error, PortionFailedError) else f"{type(error).__name__}: {error}"
            self._last_failure = what
            attempt = ledger.fail(key) or 0
            self._on_failure(what, attempt)
            if attempt == ledger.max_attempts and ledger is self._ledger:
                self._note_teaching(ledger, key, 0)
            self._start_portions()
        else:
            for what in scored[1].failures:
                self._on_failure(what, 1)
            if ledger.finish(key) and ledger is self._ledger:
                self._scored[key] = scored
                rows = self._plan.group_ids(key), scored[1].grades
                self._note_teaching(ledger, key, self._choice.num_teaching(rows))
                self._start_portions()
        async with self._changed:
            self._changed.notify_all()
