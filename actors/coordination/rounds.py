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
from actors.coordination.pools import Pools, VersionLostError, WorkUnitFailedError
from actors.messages import WeightsId, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.spec import RunSpec
from actors.training.dynamic_sampling import GroupSelection


class OpenRounds:
    """Rounds in flight between the learner's calls. A new instance continues from the next call."""

    def __init__(self, spec: RunSpec, plan: RunPlan, pools: Pools, on_failure: Callable[[str, int], None]) -> None:
        """Begin without rounds. `on_failure` receives what failed, and the number of the attempt."""
        self._spec, self._plan, self._pools, self._on_failure = spec, plan, pools, on_failure
        self.selection = GroupSelection.of(spec)
        self._ledger: Ledger | None = None
        self._weights_ids: dict[int, WeightsId] = {}
        self._scored: dict[WorkUnitKey, tuple[ray.ObjectRef[Any], WorkUnitSummary]] = {}
        self._informative: dict[int, dict[int, int]] = {}
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
        return max(self._weights_ids, default=0)

    @property
    def num_retries(self) -> int:
        """Attempts beyond the first, since the ledger was made."""
        return 0 if self._ledger is None else self._ledger.num_retries

    def is_sampled(self, round_index: int) -> bool:
        """Return whether samplers work for this round: one of the run, unless the rounds train on stored pairs."""
        return round_index < self._spec.learner.num_rounds and self._plan.work_units_per_round > 0

    def counts(self) -> dict[str, int]:
        """Return the number of work units by state."""
        return {} if self._ledger is None else self._ledger.counts()

    def unfinished(self) -> list[WorkUnitKey]:
        """Return the work units of the current round that are neither ready nor failed."""
        return [] if self._ledger is None else self._ledger.unfinished(self._ledger.next_round)

    def forget(self) -> None:
        """Cancel everything in flight, because the learner restarts or the run stops."""
        for attempt in self._tries:
            attempt.cancel()
        self._scored.clear()
        self._informative.clear()
        self._ledger = None

    def redo(self, round_index: int) -> None:
        """Sample the work units of a round again, because they can no longer be fetched."""
        if self._ledger is not None:
            for key in self._ledger.ready(round_index):
                del self._informative[round_index][key.index]
            self._ledger.redo(round_index)

    def begin(self, round_index: int, weights_id: WeightsId) -> None:
        """Begin a round from `weights_id`, and start all work units that may run, those of later rounds included."""
        self._ledger = self._ledger_at(round_index, weights_id)
        self._is_lost = False
        # Not already when the last round was published: what the learner does in between, an evaluation or a
        # checkpoint, is not part of this round, but its sampling is.
        self._start_work_units()

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
            raise RuntimeError(f"the learner has restarted and no longer needs round {round_index}")
        await self._wait_for(ledger, round_index)
        ready = ledger.ready(round_index)
        if not ready and self.is_sampled(round_index):
            raise RuntimeError(
                f"round {round_index} has no completions: all its work units failed. {self._last_failure}"
            )
        return [self._scored[key][0] for key in ready]

    def summaries(self, round_index: int) -> Mapping[WorkUnitKey, WorkUnitSummary] | None:
        """Return summaries of the ready work units of a round; None if a coordinator that died had collected them."""
        if self._ledger is None:
            return None
        return {key: self._scored[key][1] for key in self._ledger.ready(round_index)}

    def publish(self, round_index: int, weights_id: WeightsId) -> None:
        """Drop a round that the learner trained on and published as `weights_id`, and admit the next."""
        self._remember(weights_id)
        if self._ledger is not None:
            for key in self._ledger.ready(round_index):
                del self._scored[key]
            self._informative.pop(round_index, None)
            self._ledger.publish(round_index, weights_id.version)

    def _ledger_at(self, round_index: int, weights_id: WeightsId) -> Ledger:
        """Return the ledger, a new one after a restart of the learner or of this process."""
        self._remember(weights_id)
        if self._ledger is None or self._ledger.next_round != round_index:
            self._scored.clear()
            self._informative.clear()
            self._ledger = Ledger(
                num_rounds=self._spec.learner.num_rounds,
                work_units_per_round=self._plan.work_units_per_round,
                max_staleness=self._spec.learner.max_staleness,
                max_attempts=self._spec.rollout.max_attempts,
                next_round=round_index,
                version=weights_id.version,
            )
        return self._ledger

    def _remember(self, weights_id: WeightsId) -> None:
        """Remember the weights of a version, and forget versions that no work unit in flight is sampled from."""
        self._weights_ids.pop(weights_id.version, None)
        self._weights_ids[weights_id.version] = weights_id
        while len(self._weights_ids) > self._spec.learner.max_staleness + 2:
            del self._weights_ids[next(iter(self._weights_ids))]

    def _note_informative(self, ledger: Ledger, key: WorkUnitKey, num_groups: int) -> None:
        """Note the number of informative groups of a work unit, and extend the round if there are too few."""
        informative = self._informative.setdefault(key.round, {})
        informative[key.index] = num_groups
        if self.selection.is_dynamic:
            ledger.extend(
                key.round, self.selection.work_units_needed(self._plan.work_unit_sizes(key.round), informative)
            )

    async def _wait_for(self, ledger: Ledger, round_index: int) -> None:
        """Wait until a round is complete. Raises VersionLostError and TimeoutError as `complete` does."""
        timeout_s = left_s = self._spec.sampling_timeout_s + self._spec.grading_timeout_s
        async with self._changed:
            while not ledger.is_complete(round_index):
                if self._is_lost:
                    raise VersionLostError
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                    left_s = timeout_s
                except TimeoutError as error:
                    # Work that resumed after a pause gets the full timeout from the end of the pause.
                    left_s = timeout_s - self._pools.running_s
                    if left_s > 0:
                        continue
                    raise TimeoutError(
                        f"round {round_index}: no work unit finished for {timeout_s:.0f} s "
                        f"({ledger.counts()['running']} running); are all samplers placed?"
                    ) from error

    def _start_work_units(self) -> None:
        ledger = self._ledger
        while ledger is not None and not self._is_lost and (started := ledger.start_next()) is not None:
            attempt = asyncio.create_task(self._run(ledger, *started))
            # The event loop keeps only weak references to tasks.
            self._tries.add(attempt)
            attempt.add_done_callback(self._tries.discard)

    async def _run(self, ledger: Ledger, key: WorkUnitKey, version: int) -> None:
        """Run one attempt at a work unit."""
        try:
            make = partial(self._plan.round_work_unit, key.round, key.index)
            scored = await self._pools.score(self._weights_ids[version], key, make, key.round)
        except VersionLostError as error:
            if not self._is_lost:
                self._on_failure(f"{error}; the learner publishes again", 1)
            self._is_lost = True
            ledger.release(key)
        except Exception as error:  # Otherwise the error would be lost, and the round would never complete.
            what = str(error) if isinstance(error, WorkUnitFailedError) else f"{type(error).__name__}: {error}"
            self._last_failure = what
            attempt = ledger.fail(key) or 0
            self._on_failure(what, attempt)
            if attempt == ledger.max_attempts and ledger is self._ledger:
                self._note_informative(ledger, key, 0)
            self._start_work_units()
        else:
            for what in scored[1].failures:
                self._on_failure(what, 1)
            if ledger.finish(key) and ledger is self._ledger:
                self._scored[key] = scored
                rows = self._plan.group_ids(key), scored[1].grades
                self._note_informative(ledger, key, self.selection.num_informative(rows))
                self._start_work_units()
        async with self._changed:
            self._changed.notify_all()
