"""The coordinator actor: the learner's calls, answered by rounds, pools, evaluations and run log, with failover.

    samplers <-- work units -- [ coordinator: ledger, run log ] -- references --> learner
        |                           ^ summaries                                     |
        '---- completions ---> graders                         <-- next_batch, published, record

| loop              | consumes              | waits for              | produces          | unblocked by              |
|-------------------|-----------------------|------------------------|-------------------|---------------------------|
| `OpenRounds._run` | an admitted work unit | a free sampler, grader | a ready work unit | `published`, a retry      |
| `next_batch`      | a round's work units  | the complete round     | references        | `OpenRounds._run`, `stop` |
| `evaluate`        | held-out work units   | all of them            | a score           | `Pools.score`, `stop`     |
| `RunMonitor._run` |                       | a silent actor         | a failure, a kill |                           |

Failover: the learner drives the run, and every call of its rank 0 has all that the coordinator needs to continue:
round, version, digest. After a restart the coordinator makes a new ledger from the call that Ray repeats, and samples
the round again. It gets the same texts, because random draws are keyed by problem and sample, not by their order. All
other state is in the run log and in `Session`.

A background thread writes these (`actors/run_log.py`). A call that changes them is answered when the change is written,
because Ray does not repeat a call that was answered. Failures of work units and pauses are not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray

from actors.coordination.learner_group import LearnerGroup
from actors.coordination.monitor import RunMonitor
from actors.coordination.pools import Pools, VersionLostError, pool_members
from actors.coordination.reporting.metrics import RunGauges
from actors.coordination.reporting.status import RunStatus
from actors.coordination.reporting.timeline import COORDINATOR, LEARNER, SpanKind, Timeline
from actors.coordination.round_stats import RoundRecorder
from actors.coordination.rounds import OpenRounds
from actors.coordination.samplers_turn import EVALUATION, ROUND, SamplersTurn, StoppedError
from actors.coordination.session import Session, SessionFile
from actors.coordination.supervisor import Supervisor
from actors.coordination.version_evaluator import VersionEvaluator
from actors.curriculum import SolveRates
from actors.event_history import EventHistory
from actors.messages import Next, TrainedRound, WeightsId, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.registry.announcer import Announcer
from actors.registry.registry import Registry
from actors.run_log import Event, RunLog
from actors.spec import Phase, RunSpec
from learner.model.tokenizer import ChatTokenizer
from learner.parallel.progress import Place


class Coordinator:
    """Owns the ledger and the run log of one run."""

    def __init__(
        self,
        spec: RunSpec,
        samplers: Mapping[str, Any],
        graders: Mapping[str, Any],
        store: Any,
        *,
        registry_url: str,
        store_name: str,
        driver: str,
    ) -> None:
        """Begin a run, or continue it after a restart under the same `driver`.

        Samplers and graders are those that the run begins with, by name.

        Raises ValueError if the task cannot provide the problems that the recipe requires.
        """
        self._spec = spec
        self._plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
        if spec.rollout.curriculum > 1:
            self._plan.solve_rates = SolveRates(spec.run_dir)
        session = Session.read(spec.run_dir, driver)
        is_restarted = session.num_coordinator_starts > 0
        self._history = history = EventHistory(is_restarted=is_restarted)
        self._log = log = RunLog(spec.run_dir, spec.wandb_project, is_going_on=is_restarted, on_event=history.add)
        self._session = SessionFile(spec.run_dir, session, log.replace)
        self._timeline = Timeline.read(spec.run_dir) if is_restarted else Timeline()
        self._announcer = Announcer(Registry(registry_url, spec.name), log, history, spec.run_dir, store_name)
        given = {"sampler": samplers, "grader": graders}
        self._pools = Pools.for_run(spec, given, session.pools, on_pause=log.note_pause, on_left=self._note_left)
        self._supervisor = Supervisor.for_run(spec, self._pools, store, log.note_failure)
        self._evaluation = VersionEvaluator(spec, self._plan, self._pools, log.note_failure)
        self._rounds = OpenRounds(spec, self._plan, self._pools, log.note_failure)
        self._turn = SamplersTurn(self._rounds, self._pools, log.note_failure, is_colocated=spec.gpus.colocate)
        self._group = LearnerGroup(spec, self._session, log, history, self._timeline)
        self._recorder = RoundRecorder(
            self._plan, self._rounds, log, pools=self._pools, timeline=self._timeline, gauges=RunGauges(spec.name)
        )
        self._monitor = RunMonitor(
            spec,
            log,
            self._session,
            self._rounds,
            self._pools,
            history=history,
            turn=self._turn,
            supervisor=self._supervisor,
            timeline=self._timeline,
            announcer=self._announcer,
        )
        self._begin(session)

    def _begin(self, session: Session) -> None:
        if session.num_coordinator_starts:
            what = "the coordinator died and was restarted; the current round is sampled again"
            self._log.note_failure(what, session.num_coordinator_starts)
            self._log.note_pause(None)
            if (last := RunStatus.read(self._spec.run_dir)) is not None:
                self._timeline.add_since(COORDINATOR, "unreachable", SpanKind.UNREACHABLE, last.at)
        else:
            for warning in filter(None, (self._plan.length_warning, self._evaluation.room_warning)):
                self._log.note_failure(warning, 0)
        self._session.change(num_coordinator_starts=session.num_coordinator_starts + 1, leaving=[])
        for actor in pool_members(self._spec.name, {}, session.leaving).values():
            # Its work units are sampled again.
            ray.kill(actor)
        if untold := session.untold:
            weights_id = WeightsId(version=untold["version"], digest=untold["digest"])
            self._announcer.enqueue_first(weights_id, Phase(untold["phase"]), untold["round"])
        if session.is_stopping:
            self._turn.stop()

    # The log.

    async def record(self, event: str, values: dict[str, Any]) -> None:
        """Append an event to the run log, and report checkpoints that may be served to the registry."""
        if not self._history.is_repeated(event, values):
            self._log.add(event, **values)
            self._timeline.add_event(event, values)
        await self._log.written()
        if event == "checkpoint" and values["phase"] != Phase.CONTROL and "step" not in values:
            self._announcer.checkpoint(values["policy_version"], self._spec.run_dir / values["path"])

    async def stopped(self, values: dict[str, Any]) -> None:
        """Record that the learner has ended because the run is to stop, and cancel the work in flight.

        The driver kills the actors next, which is no failure of that work.
        """
        self._cancel_work()
        await self.record("stopped", values)

    async def events_since(self, count: int) -> list[Event]:
        """Return the events after the first `count`, as `RunLog.events_since` does."""
        self._monitor.ensure_running()
        return await asyncio.to_thread(self._log.events_since, count)

    async def finish(self) -> None:
        """Record that the run is done, and how long it took. Its files are then complete."""
        self._monitor.stop()
        await self._announcer.flush()
        if not self._history.is_done:
            self._log.add("done", seconds=self._log.seconds())
        self._monitor.write()
        await asyncio.to_thread(self._log.close)

    def _cancel_work(self) -> None:
        self._rounds.forget()
        self._evaluation.cancel_background()

    # The learner group.

    async def learner_starting(self, learner: str) -> dict[str, int] | None:
        """Register the start of the learner group `learner`.

        Returns the tokens of its micro-batches, by section of the recipe, where they were halved. None if it must not
        start, because groups have restarted too often without progress.
        """
        self._cancel_work()
        self._turn.cancel()
        self._supervisor.learner_starting()
        self._group.starting(learner)
        await self._turn.end()
        await self._log.written()
        session = self._session.current
        return None if session.gave_up else dict(session.micro_batch_tokens)

    async def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None:
        """Record from which checkpoint the learner group continues, and what it repeats."""
        self._group.started(checkpoint, position)
        await self._log.written()

    async def learner_failed(self, what: str, is_echo: bool, is_transient: bool, too_large: str | None = None) -> bool:
        """Record an error of a rank. One that only follows another rank's death or error (`is_echo`) does not count.

        Returns False if the group must not start again: two groups in a row raised the same error without progress.
        That does not hold for transient errors, nor where micro-batches of a section of the recipe are `too_large` for
        a GPU and can be halved for the next group.
        """
        self._group.failed(what, is_echo=is_echo, is_transient=is_transient, too_large=too_large)
        await self._log.written()
        return not self._session.current.gave_up

    async def gave_up(self) -> str:
        """Return why the learner group is not started again; empty if it ended normally."""
        return self._session.current.gave_up

    async def heartbeat(self, rank: int, place: Place, actor: Any, node: str, controller: Any = None) -> bool:
        """Register a heartbeat of a learner rank; rank 0 passes Ray Train's controller. Returns whether to stop."""
        self._monitor.ensure_running()
        self._supervisor.heartbeat(rank, place, actor, node, controller)
        return self._turn.is_stopping

    async def rank_ended(self, rank: int) -> None:
        """Register that a rank has ended normally."""
        self._supervisor.rank_ended(rank)

    async def stop(self) -> bool:
        """Make the learner write a checkpoint and end, as soon as it can. Returns False if none of its ranks is up."""
        self._session.change(is_stopping=True)
        self._turn.stop()
        await self._log.written()
        # After a restart of this process the first heartbeat may not have arrived yet.
        return bool(self._supervisor.ranks) or self._history.is_restarted

    # The pools.

    async def scale(self, kind: str, size: int, added: Mapping[str, Any]) -> None:
        """Resize a pool to `size` actors. `added` are new ones, by name; surplus ones leave when they are free."""
        before = len(self._pools.staying()[kind])
        self._pools.scale(kind, size, added)
        self._save_members()
        if size != before:
            self._log.add("scale", pool=f"{kind}s", before=before, after=size)
        await self._log.written()

    def _note_left(self, name: str) -> None:
        self._supervisor.liveness.forget(name)
        self._save_members()

    def _save_members(self) -> None:
        self._session.change(pools=self._pools.staying(), leaving=self._pools.leaving())

    # The rounds.

    async def next_batch(
        self, round_index: int, weights_id: WeightsId, trained: TrainedRound | None = None, label: str = ""
    ) -> tuple[Next, list[ray.ObjectRef[Any]]]:
        """Return references of a round's scored work units, or what to do first. Raises as `OpenRounds.complete` does.

        `trained` is the round before, if the learner has not reported it yet. It is recorded as by `published`, and is
        on disk when this returns; the samplers do not wait for that. `label` is of an evaluation of `weights_id` that
        the learner will request after training on the round. It begins now, in the background: behind the round's work
        units and before those of the next.
        """
        summaries = None
        if trained is not None and not self._is_published(trained):
            if (summaries := self._rounds.summaries(trained.round)) is None:
                return Next.REPORT, []
            self._recorder.release(trained, summaries)
        try:
            async with self._turn.taken(ROUND):
                self._rounds.begin(round_index, weights_id)
                # Lets the samplers start before the evaluation, and before this process waits for a disk.
                await asyncio.sleep(0)
                if label and not self._history.is_evaluated(weights_id.version, label, is_new=True):
                    self._evaluation.start_background(weights_id, label, round_index + 0.5)
                if trained is not None and summaries is not None:
                    await self._recorder.record(trained, summaries)
                return Next.CONTINUE, await self._turn.unless_stopped(self._rounds.complete(round_index))
        except StoppedError:
            self._evaluation.cancel_background()
            return Next.STOP, []
        except VersionLostError:
            return Next.PUBLISH, []

    async def forget(self, round_index: int) -> None:
        """Sample the work units of a round again, because they can no longer be fetched."""
        self._rounds.redo(round_index)

    async def published(self, trained: TrainedRound, summaries: Mapping[WorkUnitKey, WorkUnitSummary] | None) -> bool:
        """Record a round that the learner trained on and published. It is on disk when this returns.

        Returns False if the round's work units are not known here, because they were collected before a restart:
        `summaries` must then be given.
        """
        if self._is_published(trained):
            return True  # A repeated call.
        summaries = self._rounds.summaries(trained.round) if summaries is None else summaries
        if summaries is None:
            return False
        self._recorder.release(trained, summaries)
        await self._recorder.record(trained, summaries)
        return True

    def _is_published(self, trained: TrainedRound) -> bool:
        next_round = self._rounds.next_round
        # Before the first round of this process only the log shows whether an earlier one died after recording it.
        if next_round is None:
            return self._history.has_round(trained.round, trained.weights_id.version)
        return next_round > trained.round

    # Versions and their scores.

    async def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        """Announce a new version in the weight store to samplers, which prefetch it, and to registry and service."""
        if phase is Phase.RL and self._rounds.is_sampled(round_index):
            self._pools.prefetch(weights_id)
        is_told = await self._announcer.announce(weights_id, phase, round_index)
        untold = {} if is_told else {**asdict(weights_id), "phase": phase, "round": round_index}
        if untold != self._session.current.untold:
            self._session.change(untold=untold)
            await self._log.written()

    async def evaluate(self, weights_id: WeightsId, label: str, round_index: int, is_new: bool) -> Next:
        """Evaluate a version in the weight store on the problems of a label, and record its accuracy.

        It is also reported to the registry, unless the version is the control's. An evaluation that already runs in the
        background of a round is awaited. One in the log is not repeated, for a version that is not new.
        Raises RuntimeError if all attempts at a work unit failed: an accuracy over fewer problems is not comparable.
        """
        version = weights_id.version
        if self._history.is_evaluated(version, label, is_new=is_new):
            return Next.CONTINUE
        began = time.monotonic()
        try:
            async with self._turn.taken(EVALUATION):
                scored = await self._turn.unless_stopped(self._evaluation.score_now(weights_id, label))
        except StoppedError:
            return Next.STOP
        except VersionLostError as error:
            self._log.note_failure(str(error))
            return Next.PUBLISH
        finally:
            self._evaluation.cancel_background()
            self._timeline.add(LEARNER, f"evaluation of version {version}", SpanKind.WAIT, began)
        self._log.add("evaluation", label=label, policy_version=version, round=round_index, **scored)
        await self._log.written()
        if label != Phase.CONTROL:
            self._announcer.evaluated(version, label, scored["num_correct"], scored["num_problems"])
        return Next.CONTINUE

    async def versions_to_keep(self) -> list[int]:
        """Return the versions whose checkpoints must stay: the best, and one that an operator has pinned."""
        wanted = self._history.evaluations.best(), self._announcer.pinned()
        return [version for version in wanted if version is not None]

    async def status(self) -> RunStatus:
        """Return the current status of the run."""
        return self._monitor.status()
