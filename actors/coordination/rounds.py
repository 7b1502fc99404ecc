"""The rounds of a run as the coordinator has them: portions that are sampled, graded and waited for.

One try of one portion is a task; the ledger says what to try next, and what has become of it.
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
    """What is under way between the learner's calls. Made anew, it goes on from the next call."""

    def __init__(self, spec: RunSpec, plan: RunPlan, pools: Pools, on_failure: Callable[[str, int], None]) -> None:
        """`on_failure` is told what failed, and at which attempt."""
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
        """The first round that is not published; None before the learner has asked for one."""
        return None if self._ledger is None else self._ledger.next_round

    @property
    def newest_version(self) -> int:
        """The newest version that the learner has spoken of."""
        return max(self._generations, default=0)

    @property
    def num_retries(self) -> int:
        """Tries beyond the first, since the ledger was made."""
        return 0 if self._ledger is None else self._ledger.num_retries

    def counts(self) -> dict[str, int]:
        """Portions by state."""
        return {} if self._ledger is None else self._ledger.counts()

    def unfinished(self) -> list[PortionKey]:
        """The portions of the round under way that are neither ready nor failed."""
        return [] if self._ledger is None else self._ledger.unfinished(self._ledger.next_round)

    def forget(self) -> None:
        """The learner begins again: nothing that is under way is waited for."""
        for attempt in self._tries:
            attempt.cancel()
        self._scored.clear()
        self._teaching.clear()
        self._ledger = None

    def redo(self, round_index: int) -> None:
        """The portions of a round cannot be fetched any more: they are sampled again."""
        if self._ledger is not None:
            for key in self._ledger.ready(round_index):
                del self._teaching[round_index][key.index]
            self._ledger.redo(round_index)

    def begin(self, round_index: int, generation: Generation) -> None:
        """Start what may be started of a round, and of those after it, from `generation`."""
        self._ledger = self._ledger_at(round_index, generation)
        self._is_lost = False
        # Now and not when the last round was published: what the learner did in between, an evaluation or a
        # checkpoint, is not a part of this round, and its sampling is.
        self._start_portions()

    async def complete(self, round_index: int) -> list[ray.ObjectRef[Any]]:
        """References of the scored portions of a round that has begun, once all are in, sampled from the generation
        that it began with or up to S before it.

        Raises:
            VersionLostError: the learner has to publish first.
            TimeoutError: nothing came back for longer than a portion's tries may take, and nothing is waited for.
            RuntimeError: every portion of the round failed, or the learner has begun again.
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
        """Of the ready portions of a round; None where they were gathered by a coordinator that died."""
        if self._ledger is None:
            return None
        return {key: self._scored[key][1] for key in self._ledger.ready(round_index)}

    def publish(self, round_index: int, generation: Generation) -> None:
        """The learner trained on a round and published `generation`: the round's slots are free."""
        self._generations[generation.version] = generation
        if self._ledger is not None:
            for key in self._ledger.ready(round_index):
                del self._scored[key]
            self._teaching.pop(round_index, None)
            self._ledger.publish(round_index, generation.version)

    def _ledger_at(self, round_index: int, generation: Generation) -> Ledger:
        """The ledger, which is made anew after a restart of the learner or of this process."""
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
        """So many groups of a portion teach something: ask more where that is too little."""
        teaching = self._teaching.setdefault(key.round, {})
        teaching[key.index] = num_groups
        if self._choice.is_dynamic:
            ledger.extend(key.round, self._choice.portions_needed(self._plan.portion_sizes(key.round), teaching))

    async def _wait_for(self, ledger: Ledger, round_index: int) -> None:
        """Raises VersionLostError and TimeoutError as `complete` does."""
        patience_s = left_s = self._spec.sampling_timeout_s + self._spec.grading_timeout_s
        async with self._changed:
            while not ledger.is_complete(round_index):
                if self._is_lost:
                    raise VersionLostError
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                    left_s = patience_s
                except TimeoutError as error:
                    # What began again when a pause ended has as long as any other.
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
            # The event loop itself does not hold a task until it is done.
            self._tries.add(attempt)
            attempt.add_done_callback(self._tries.discard)

    async def _run(self, ledger: Ledger, key: PortionKey, version: int) -> None:
        """One try of one portion."""
        try:
            make = partial(self._plan.round_portion, key.round, key.index)
            scored = await self._pools.score(self._generations[version], key, make, key.round)
        except VersionLostError as error:
            if not self._is_lost:
                self._on_failure(f"{error}; the learner publishes again", 1)
            self._is_lost = True
            ledger.release(key)
        except Exception as error:  # Else nobody would hear of it, and the round would wait for this portion.
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
