"""Monitor of a run: composes its status from what each part of the coordinator knows, and writes it periodically."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import partial

from actors.coordination.learner_wait import LearnerWait
from actors.coordination.pools import Pools
from actors.coordination.rank_progress import standstill_texts
from actors.coordination.reporting.status import (
    SILENT_S,
    RunStatus,
    actor_statuses,
    restarts_by_kind,
    silence_texts,
    wait_text,
    writing_text,
)
from actors.coordination.reporting.timeline import Timeline, write_trace
from actors.coordination.rounds import OpenRounds
from actors.coordination.samplers_turn import ROUND, SamplersTurn
from actors.coordination.session import SessionFile
from actors.coordination.supervisor import Supervisor
from actors.event_history import EventHistory
from actors.registry.announcer import Announcer
from actors.run_log import RunLog
from actors.spec import Phase, RunSpec

_EVERY_S = 2.0


class RunMonitor:
    """Monitor of a run."""

    def __init__(
        self,
        spec: RunSpec,
        log: RunLog,
        session: SessionFile,
        rounds: OpenRounds,
        pools: Pools,
        *,
        history: EventHistory,
        turn: SamplersTurn,
        supervisor: Supervisor,
        timeline: Timeline,
        announcer: Announcer,
    ) -> None:
        self._spec, self._log, self._history = spec, log, history
        self._session, self._rounds, self._pools = session, rounds, pools
        self._turn, self._supervisor, self._timeline, self._announcer = turn, supervisor, timeline, announcer
        self._task: asyncio.Task[None] | None = None
        self._learner_wait = LearnerWait(spec, log.note_failure)

    def ensure_running(self) -> None:
        """Start the periodic task, or restart it after an error. To be called from the event loop."""
        if self._task is not None and (not self._task.done() or self._task.cancelled()):
            return
        if self._task is not None:
            self._log.note_failure(f"monitoring of the actors failed and was restarted: {self._task.exception()}")
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self._supervisor.sweep()
            self._pools.check_outages()
            self._announcer.retry()
            await self._learner_wait.check(is_down=self._supervisor.is_learner_down)
            self.write()
            await asyncio.sleep(_EVERY_S)

    def stop(self) -> None:
        """End the periodic task."""
        if self._task is not None:
            self._task.cancel()

    def write(self) -> None:
        """Have status and timeline written to the run directory, in the background."""
        self._timeline.add_work_spans(self._pools.take_spans())
        if (spans := self._timeline.take_changed()) is not None:
            self._log.show("timeline", partial(write_trace, self._spec.run_dir, spans))
        self._log.show("status", partial(self.status().write, self._spec.run_dir))

    def status(self) -> RunStatus:
        """Return the current status."""
        newest, next_round, session = self._history.newest("round"), self._rounds.next_round, self._session.current
        return RunStatus(
            at=time.time(),
            stage=self._history.newest("phase").get("phase", Phase.UNTRAINED),
            round=newest.get("round", -1) + 1 if next_round is None else next_round,
            num_rounds=self._spec.learner.num_rounds,
            policy_version=self._rounds.newest_version,
            learner={str(one.rank): str(one.place) for one in self._supervisor.ranks.values()},
            work_units=self._rounds.counts(),
            pools=actor_statuses(self._pools.members(), self._pools.assignments(), self._pools.unreachable()),
            waits=tuple(self._waits()),
            max_staleness=self._spec.learner.max_staleness,
            staleness=newest.get("mean_staleness", 0.0),
            num_restarts={
                "coordinator": session.num_coordinator_starts - 1,
                "learner": max(0, session.num_learner_starts - 1),
                **restarts_by_kind(self._supervisor.liveness.num_restarts()),
            },
            seconds={name: newest[f"{name}_s"] for name in ("sampling", "training", "publish") if newest},
            log=asdict(self._log.backlog()),
        )

    def _waits(self) -> list[str]:
        assignments, liveness = self._pools.assignments(), self._supervisor.liveness
        texts = silence_texts(liveness.silent(), liveness.starting(), assignments)
        if self._turn.waiting_since is not None:
            what, since = self._turn.waiting_since
            who = f"round {self._rounds.next_round}" if what is ROUND else what
            seconds = time.monotonic() - since
            if seconds > SILENT_S:
                keys = self._rounds.unfinished() if what is ROUND else [held.key for held in assignments]
                texts.append(wait_text(who, seconds, keys, assignments))
        elif (rank_0 := self._supervisor.ranks.get(0)) is not None:
            seconds = time.monotonic() - rank_0.activity_since
            if seconds > SILENT_S:
                texts.append(f"learner busy for {seconds:.0f} s: {rank_0.place}")
        if (backlog := self._log.backlog()).writing_s > SILENT_S:
            texts.append(writing_text(backlog.writing_s, backlog.num_waiting))
        return texts + self._learner_wait.texts() + standstill_texts(self._supervisor.ranks.values())
