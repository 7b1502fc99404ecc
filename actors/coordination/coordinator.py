"""The coordinator actor: an asynchronous shell over rounds, pools and run log, with failover.

Ray restarts it if it dies, and nothing is lost.

    samplers <-- work units -- [ coordinator: ledger, run log ] -- references --> learner
        |                           ^ summaries                                     |
        '---- completions ---> graders                         <-- next_batch, published, record

| loop              | consumes              | waits for              | produces          | unblocked by              |
|-------------------|-----------------------|------------------------|-------------------|---------------------------|
| `OpenRounds._run` | an admitted work unit | a free sampler, grader | a ready work unit | `published`, a retry      |
| `next_batch`      | a round's work units  | the complete round     | references        | `OpenRounds._run`, `stop` |
| `evaluate`        | held-out work units   | all of them            | a score           | `Pools.score`, `stop`     |
| `_monitor`     |                       | a silent actor         | a failure, a kill |                           |

Where samplers and learner share GPUs and take turns (`gpus.colocate`), the samplers' turn lasts as long as `next_batch`
or `evaluate`. The learner is offloaded to host memory before it calls, and the call returns once the samplers have
released their device memory.

Failover: the learner drives the run, and every call of its rank 0 has all that the coordinator needs to continue:
round, version, digest. After a restart the coordinator makes a new ledger from the call that Ray repeats, and samples
the round again. It gets the same texts, because random draws are keyed by problem and sample, not by their order. All
other state is in the run log and in `Session`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, TypeVar

import ray

from actors import NAMESPACE, actor_name
from actors.checkpoints.best import best_version, current_evaluations
from actors.coordination.liveness import LivenessMonitor
from actors.coordination.metrics import RunGauges
from actors.coordination.pools import Pools, VersionLostError
from actors.coordination.round_stats import readable_samples, round_stats
from actors.coordination.rounds import OpenRounds
from actors.coordination.session import Session
from actors.coordination.status import SILENT_S, RunStatus, actor_statuses, restarts_by_kind, silence_texts, wait_text
from actors.coordination.timeline import COORDINATOR, LEARNER, SpanKind, Timeline
from actors.coordination.version_evaluator import VersionEvaluator
from actors.curriculum import line_of, outcomes_of, read_solve_rates
from actors.messages import Next, TrainedRound, WeightsId, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.registry.announcer import Announcer
from actors.registry.registry import Registry
from actors.run_log import LEARNER_FAILED, RESTARTED, Event, RunLog, is_done
from actors.spec import Phase, RunSpec
from actors.training.dynamic_sampling import GroupSelection
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer

_SAMPLES_PER_ROUND = 4
_STATUS_EVERY_S = 2.0
# Newest events that are searched for one that is recorded a second time.
_NEWEST = 20
# Problems that a message lists; the log's evaluations list all.
_MOST_NAMED = 20
_RANK = "learner rank "
_STORE = "the weight store"
_CONTROLLER = "Ray Train's controller"
# Longer than for other actors: it does not answer while it starts or ends a group.
_CONTROLLER_HUNG_S = 90.0
_ROUND, _EVALUATION = "the round", "the evaluation"
# Due before all rounds: an evaluation that the learner waits for.
_AT_ONCE = -1.0
T = TypeVar("T")


class StoppedError(Exception):
    """The run is to stop before the awaited result is there."""


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
        self._plan.solve_rates = read_solve_rates(spec.run_dir)
        session = Session.read(spec.run_dir, driver)
        self._pools = Pools(
            _members(spec.name, samplers, session.pools.get("sampler")),
            _members(spec.name, graders, session.pools.get("grader")),
            spec.sampling_timeout_s,
            spec.grading_timeout_s,
            on_pause=self._note_pause,
            on_left=self._note_left,
        )
        self._log = RunLog(spec.run_dir, spec.wandb_project, is_going_on=session.num_coordinator_starts > 0)
        self._gauges = RunGauges(spec.name)
        self._announcer = Announcer(Registry(registry_url, spec.name), self._log, spec.run_dir, store_name)
        schedules = spec.evaluation.params(spec.rollout.sampling)
        self._policy = load_config(spec.initial_checkpoint)
        self._evaluation = VersionEvaluator(
            self._plan,
            schedules,
            self._pools,
            spec.rollout.max_attempts,
            self._note_failure,
            policy=self._policy,
        )
        self._rounds = OpenRounds(spec, self._plan, self._pools, self._note_failure)
        self._liveness = LivenessMonitor(self._end_hung)
        self._timeline = Timeline()
        self._activity: dict[str, tuple[str, float]] = {}
        self._has_echoed = False
        self._waiting_since: tuple[str, float] | None = None
        self._learner_starting_at = time.monotonic()
        self._stopping = asyncio.Event()
        self._pending_requests: set[asyncio.Task[Any]] = set()
        self._background_evaluation: tuple[tuple[WeightsId, str], asyncio.Task[dict[str, Any]]] | None = None
        """Background evaluation during the current round: its version and label, and its task."""
        self._store = store
        self._monitoring: asyncio.Task[None] | None = None
        self._begin(session)

    def _begin(self, session: Session) -> None:
        if session.num_coordinator_starts:
            what = "the coordinator died and was restarted; the current round is sampled again"
            self._note_failure(what, session.num_coordinator_starts)
            self._end_pause()
            self._timeline = Timeline.read(self._spec.run_dir)
            if (last := RunStatus.read(self._spec.run_dir)) is not None:
                self._timeline.add_since(COORDINATOR, "unreachable", SpanKind.UNREACHABLE, last.at)
        else:
            self._note_overlong()
        self._save_session(session, num_coordinator_starts=session.num_coordinator_starts + 1, leaving=[])
        for actor in _members(self._spec.name, {}, session.leaving).values():
            # Its work units are sampled again.
            ray.kill(actor)
        if untold := session.untold:
            weights_id = WeightsId(version=untold["version"], digest=untold["digest"])
            self._announcer.enqueue_first(weights_id, Phase(untold["phase"]), untold["round"])
        if session.is_stopping:
            self._stopping.set()

    def _note_overlong(self) -> None:
        """Record how many prompts are too long, and how they are handled."""
        rollout = self._spec.rollout
        if self._plan.num_overlong:
            is_cut = rollout.overlong_prompts == "truncate_left"
            fate = "cut to their last tokens" if is_cut else "not trained on"
            limit = f"rollout.max_prompt_tokens {rollout.max_prompt_tokens}"
            self._note_failure(f"{self._plan.num_overlong} prompts are longer than {limit} and {fate}", 0)
        if names := [problem.problem_id for problem in self._evaluation.without_room]:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            self._note_failure(
                f"{len(names)} evaluation problems count as wrong, as their prompts leave no room for "
                f"{rollout.sampling.gen_length} slots in the policy's {self._policy.max_sequence_length} tokens: "
                f"{', '.join(names[:_MOST_NAMED])}{more}",
                0,
            )

    # The log.

    async def record(self, event: str, values: dict[str, Any]) -> None:
        """Append an event to the run log, and report checkpoints that may be served to the registry."""
        if not self._is_repeated(event, values):
            self._log.append(event, **values)
            self._timeline.add_event(event, values)
        if event == "checkpoint" and values["phase"] != Phase.CONTROL and "step" not in values:
            self._announcer.checkpoint(values["policy_version"], self._spec.run_dir / values["path"])

    async def events_since(self, count: int) -> list[Event]:
        """Return the events after the first `count`."""
        self._ensure_monitoring()
        return self._log.events_since(count)

    async def finish(self) -> None:
        """Record that the run is done, and how long it took. Its files are then complete."""
        if self._monitoring is not None:
            self._monitoring.cancel()
        await self._announcer.flush()
        if not is_done(self._log.events_since(0)):
            self._log.append("done", seconds=self._log.seconds())
        self._log.close()
        await self._write_status()

    def _is_repeated(self, event: str, values: Mapping[str, Any]) -> bool:
        """Whether the newest events contain this one. Ray repeats a call if the coordinator dies as it answers."""
        if self._session.num_coordinator_starts == 1:
            return False
        asked = json.loads(json.dumps({"event": event, **values}))
        newest = _since_learner_start(self._log.events_since(0))[-_NEWEST:]
        return any(one == asked | {"time_s": one["time_s"]} for one in newest)

    def _note_failure(self, what: str, attempt: int) -> None:
        self._log.append("failure", what=what, attempt=attempt)

    def _end_pause(self) -> None:
        """Record the end of a pause that is open in the log, if any. It may have begun before a restart."""
        pauses = [event for event in self._log.events_since(0) if event["event"] in ("pause", "pause_end")]
        if pauses and pauses[-1]["event"] == "pause":
            self._log.append("pause_end", seconds=round(self._log.seconds() - pauses[-1]["time_s"], 3))

    def _note_pause(self, why: str | None) -> None:
        """Record that work pauses because something does not answer, or (None) that it resumes."""
        if why is None:
            self._end_pause()
        else:
            self._log.append("pause", what=why)

    # The learner group.

    async def learner_starting(self, learner: str) -> dict[str, int] | None:
        """Register the start of the learner group `learner`.

        Returns the tokens of its micro-batches, by section of the recipe, where they were halved. None if it must not
        start, because groups have restarted too often without progress.
        """
        self._forget_learner()
        self._learner_starting_at = time.monotonic()
        self._save_session(self._session.with_learner_start(learner, self._num_checkpoints()))
        await self._end_samplers_turn()
        return None if self._session.gave_up else dict(self._session.micro_batch_tokens)

    async def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None:
        """Record from which checkpoint the learner group continues, and what it repeats. All starts but the first
        follow a failure."""
        self._timeline.add(LEARNER, "loading a checkpoint", SpanKind.WORK, self._learner_starting_at)
        events = self._log.events_since(0)
        again = _done_again(events, position)
        if self._session.num_learner_starts > 1:
            what = f"{RESTARTED} from checkpoint {checkpoint}; {again}"
            self._note_failure(what, self._session.num_learner_starts - 1)
        elif any(event["event"] == "phase" for event in events) or position["policy_version"] or position["step"]:
            self._log.append("resume", what=f"going on from checkpoint {checkpoint}; {again}")

    async def learner_failed(self, what: str, is_echo: bool, is_transient: bool, too_large: str | None = None) -> bool:
        """Record an error of a rank. One that only follows another rank's death or error (`is_echo`) does not count.

        Returns False if the group must not start again: two groups in a row raised the same error without progress.
        That does not hold for transient errors, nor where micro-batches of a section of the recipe are `too_large` for
        a GPU and can be halved for the next group.
        """
        if not self._session.error and not (is_echo and self._has_echoed):
            self._has_echoed = is_echo
            if too_large is not None:
                what = self._smaller(too_large, what)
            elif not is_echo:
                self._save_session(self._session.with_error(what, self._num_checkpoints(), is_transient=is_transient))
            self._note_failure(f"{LEARNER_FAILED}: {what}", 1)
        return not self._session.gave_up

    def _smaller(self, section: str, what: str) -> str:
        """Halve a section's micro-batches for the next learner group, unless they hold one row. Returns the message."""
        spec = self._spec.with_micro_batches(self._session.micro_batch_tokens)
        tokens, row = spec.learner.micro_batch_tokens, spec.canvas_tokens
        if section == "sft":
            tokens, row = spec.sft_micro_batch_tokens, spec.sft_tokens
        if tokens // 2 >= row:
            what = f"{what}; retrying with micro-batches of {tokens // 2} tokens instead of {tokens}"
            self._save_session(self._session.with_micro_batches(section, tokens // 2, what))
            return what
        what = (
            f"{what}; micro-batches of {tokens} tokens cannot be halved, a canvas has {row}: take "
            "sharding.activation_checkpointing=true or more learner.num_workers"
        )
        self._save_session(self._session.with_error(what, self._num_checkpoints(), is_transient=False))
        return what

    def _num_checkpoints(self) -> int:
        return sum(event["event"] == "checkpoint" for event in self._log.events_since(0))

    async def gave_up(self) -> str:
        """Return why the learner group is not started again; empty if it ended normally."""
        return self._session.gave_up

    async def heartbeat(self, rank: int, doing: str, actor: Any, controller: Any = None) -> bool:
        """Register a heartbeat of a learner rank; rank 0 passes Ray Train's controller. Returns whether to stop."""
        self._ensure_monitoring()
        if controller is not None and not self._liveness.is_watched(_CONTROLLER):
            self._liveness.probe(_CONTROLLER, controller, _controller_answers, _CONTROLLER_HUNG_S)
        if self._activity.get(str(rank), ("", 0.0))[0] != doing:
            self._activity[str(rank)] = doing, time.monotonic()
        self._liveness.record_heartbeat(f"{_RANK}{rank}", actor)
        return self._stopping.is_set()

    async def rank_ended(self, rank: int) -> None:
        """Register that a rank has ended normally."""
        self._liveness.forget(f"{_RANK}{rank}")
        self._activity.pop(str(rank), None)

    async def stop(self) -> bool:
        """Make the learner write a checkpoint and end, as soon as it can. Returns False if none of its ranks is up."""
        self._save_session(self._session, is_stopping=True)
        self._stopping.set()
        # After a restart of this process the first heartbeat may not have arrived yet.
        return bool(self._activity) or self._session.num_coordinator_starts > 1

    # The pools.

    async def scale(self, kind: str, size: int, added: Mapping[str, Any]) -> None:
        """Resize a pool to `size` actors. `added` are new ones, by name; surplus ones leave when they are free."""
        before = len(self._pools.staying()[kind])
        self._pools.scale(kind, size, added)
        if self._monitoring is not None:
            for name, actor in added.items():
                if not self._liveness.is_watched(name):
                    self._liveness.probe(name, actor)
        self._save_members()
        if size != before:
            self._log.append("scale", pool=f"{kind}s", before=before, after=size)

    def _note_left(self, name: str) -> None:
        self._liveness.forget(name)
        self._save_members()

    def _save_members(self) -> None:
        self._save_session(self._session, pools=self._pools.staying(), leaving=self._pools.leaving())

    def _save_session(self, session: Session, **changes: Any) -> None:
        self._session = replace(session, **changes).write(self._spec.run_dir)

    def _forget_learner(self) -> None:
        self._rounds.forget()
        for asked in self._pending_requests:
            asked.cancel()
        self._cancel_background_evaluation()
        # The controller starts another group, and does not answer until that is up.
        self._liveness.forget(_CONTROLLER, *(f"{_RANK}{rank}" for rank in self._activity))
        self._activity.clear()
        self._has_echoed = False

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
            self._release_round(trained, summaries)
        self._waiting_since = _ROUND, time.monotonic()
        try:
            async with self._samplers_turn():
                self._rounds.begin(round_index, weights_id)
                # Lets the samplers start before the evaluation, and before this process sums up the previous round and
                # waits for a disk.
                await asyncio.sleep(0)
                if label:
                    self._start_background_evaluation(weights_id, label, round_index)
                if trained is not None and summaries is not None:
                    await self._record_round(trained, summaries)
                return Next.CONTINUE, await self._unless_stopped(self._rounds.complete(round_index))
        except StoppedError:
            self._cancel_background_evaluation()
            return Next.STOP, []
        except VersionLostError:
            return Next.PUBLISH, []
        finally:
            self._waiting_since = None

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
        summaries = summaries or self._rounds.summaries(trained.round)
        if summaries is None:
            return False
        self._release_round(trained, summaries)
        await self._record_round(trained, summaries)
        return True

    def _is_published(self, trained: TrainedRound) -> bool:
        next_round = self._rounds.next_round
        # Before the first round of this process only the log shows whether an earlier one died after recording it.
        return self._has_round(trained) if next_round is None else next_round > trained.round

    def _has_round(self, trained: TrainedRound) -> bool:
        """Whether the newest round of this learner group in the log is this one, from a coordinator that died as it
        answered."""
        events = _since_learner_start(self._log.events_since(0))
        rounds = [event for event in events if event["event"] == "round"]
        asked = trained.round, trained.weights_id.version
        return bool(rounds) and (rounds[-1]["round"], rounds[-1]["policy_version"]) == asked

    def _release_round(self, trained: TrainedRound, by_key: Mapping[WorkUnitKey, WorkUnitSummary]) -> None:
        """Let later rounds begin: record which problems of this one were solved, and remove it from the ledger."""
        outcomes = outcomes_of((self._plan.work_unit_problems(key), summary.grades) for key, summary in by_key.items())
        self._log.add_solve_rates(line_of(trained.round, outcomes))
        self._plan.record_outcomes(trained.round, outcomes)
        self._rounds.publish(trained.round, trained.weights_id)

    async def _record_round(self, trained: TrainedRound, by_key: Mapping[WorkUnitKey, WorkUnitSummary]) -> None:
        """Write a round to the run log, on disk when this returns, and to samples, metrics and timeline."""
        plan, summaries, values = self._plan, list(by_key.values()), trained.values
        version = trained.weights_id.version
        stats = round_stats([plan.group_ids(key) for key in by_key], summaries, GroupSelection.of(self._spec))
        seconds = values["sampling_s"] + values["training_s"] + values["publish_s"]
        event = self._log.add(
            "round",
            round=trained.round,
            policy_version=version,
            **stats,
            num_retries=self._rounds.num_retries,
            pools=self._pools.use(),
            **_staleness(summaries, version - 1),
            **values,
            tokens_per_s=round(stats["mean_tokens"] * stats["num_completions"] / seconds, 1),
        )
        self._log.add_samples(
            readable_samples(
                by_key, _SAMPLES_PER_ROUND, lambda key: plan.round_work_unit(key.round, key.index), plan.prompt_text
            )
        )
        self._gauges.show(event)
        self._timeline.add_round(trained.round, values)
        await asyncio.to_thread(self._log.write_out)

    @asynccontextmanager
    async def _samplers_turn(self) -> AsyncIterator[None]:
        """Give the samplers their turn while the learner waits. On shared GPUs it is offloaded meanwhile, and at the
        end the samplers release their device memory."""
        try:
            yield
        finally:
            await self._end_samplers_turn()

    async def _end_samplers_turn(self) -> None:
        if not self._spec.gpus.colocate:
            return
        if self._stopping.is_set():
            # Work in flight would start again as soon as a sampler is up.
            self._rounds.forget()
        for what in await self._pools.end_turn():
            self._note_failure(what, 1)

    # Versions and their scores.

    async def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        """Announce a new version in the weight store to samplers, which prefetch it, and to registry and service."""
        if phase is Phase.RL and round_index < self._spec.learner.num_rounds:
            self._pools.prefetch(weights_id)
        is_told = await self._announcer.announce(weights_id, phase, round_index)
        untold = {} if is_told else {**asdict(weights_id), "phase": phase, "round": round_index}
        if untold != self._session.untold:
            self._save_session(self._session, untold=untold)

    async def evaluate(self, weights_id: WeightsId, label: str, round_index: int, is_new: bool) -> Next:
        """Evaluate a version in the weight store on the problems of a label, and record its accuracy.

        It is also reported to the registry, unless the version is the control's. An evaluation that already runs in the
        background of a round is awaited. One in the log is not repeated, for a version that is not new.
        Raises RuntimeError if all attempts at a work unit failed: an accuracy over fewer problems is not comparable.
        """
        version = weights_id.version
        if self._is_evaluated(version, label, is_new=is_new):
            return Next.CONTINUE
        began = time.monotonic()
        self._waiting_since = _EVALUATION, began
        try:
            async with self._samplers_turn():
                scored = await self._unless_stopped(self._scored(weights_id, label))
        except StoppedError:
            return Next.STOP
        except VersionLostError as error:
            self._note_failure(str(error), 1)
            return Next.PUBLISH
        finally:
            self._cancel_background_evaluation()
            self._waiting_since = None
            self._timeline.add(LEARNER, f"evaluation of version {version}", SpanKind.WAIT, began)
        self._log.append("evaluation", label=label, policy_version=version, round=round_index, **scored)
        if label != Phase.CONTROL:
            self._announcer.evaluated(version, label, scored["num_correct"], scored["num_problems"])
        return Next.CONTINUE

    async def _scored(self, weights_id: WeightsId, label: str) -> dict[str, Any]:
        if self._background_evaluation is not None and self._background_evaluation[0] == (weights_id, label):
            # If the store had lost the version, the learner has published it again for the round: evaluate below.
            with suppress(VersionLostError):
                return await self._background_evaluation[1]
        return await self._evaluation.score(weights_id, label, _AT_ONCE)

    def _start_background_evaluation(self, weights_id: WeightsId, label: str, round_index: int) -> None:
        """Evaluate a version in the background, before the next round's work units, unless an evaluation runs."""
        if self._background_evaluation is None and not self._is_evaluated(weights_id.version, label, is_new=True):
            scoring = self._evaluation.score(weights_id, label, round_index + 0.5)
            self._background_evaluation = (weights_id, label), asyncio.create_task(scoring)

    def _cancel_background_evaluation(self) -> None:
        if self._background_evaluation is not None:
            # Marks its exception as retrieved: it was raised already, or the evaluation is requested again.
            self._background_evaluation[1].add_done_callback(lambda task: task.cancelled() or task.exception())
            self._background_evaluation[1].cancel()
            self._background_evaluation = None

    async def versions_to_keep(self) -> list[int]:
        """Return the versions whose checkpoints must stay: the best, and one that an operator has pinned."""
        wanted = best_version(self._log.events_since(0)), self._announcer.pinned()
        return [version for version in wanted if version is not None]

    def _is_evaluated(self, version: int, label: str, *, is_new: bool) -> bool:
        """Whether the log has this evaluation. For a new version only events since the learner started count, and only
        after a restart of the coordinator, which may have died as it answered."""
        events = self._log.events_since(0)
        if is_new:
            events = _since_learner_start(events) if self._session.num_coordinator_starts > 1 else []
        evaluations = current_evaluations(events)
        return any((event["label"], event["policy_version"]) == (label, version) for event in evaluations)

    # Status and liveness.

    async def status(self) -> RunStatus:
        """Return the current status of the run."""
        events = self._log.events_since(0)
        last = {event["event"]: event for event in events}
        stage = last.get("phase", {}).get("phase", Phase.UNTRAINED)
        newest = last.get("round", {})
        assignments, next_round = self._pools.assignments(), self._rounds.next_round
        return RunStatus(
            at=time.time(),
            stage=stage,
            round=newest.get("round", -1) + 1 if next_round is None else next_round,
            num_rounds=self._spec.learner.num_rounds,
            policy_version=self._rounds.newest_version,
            learner={rank: doing for rank, (doing, _) in self._activity.items()},
            work_units=self._rounds.counts(),
            pools=actor_statuses(self._pools.members(), assignments, self._pools.unreachable()),
            waits=tuple(self._waits()),
            max_staleness=self._spec.learner.max_staleness,
            staleness=newest.get("mean_staleness", 0.0),
            num_restarts={
                "coordinator": self._session.num_coordinator_starts - 1,
                "learner": max(0, self._session.num_learner_starts - 1),
                **restarts_by_kind(self._liveness.num_restarts()),
            },
            seconds={name: newest[f"{name}_s"] for name in ("sampling", "training", "publish") if newest},
        )

    def _waits(self) -> list[str]:
        assignments = self._pools.assignments()
        texts = silence_texts(self._liveness.silent(), self._liveness.starting(), assignments)
        if self._waiting_since is not None:
            what, since = self._waiting_since
            who = f"round {self._rounds.next_round}" if what is _ROUND else what
            seconds = time.monotonic() - since
            if seconds > SILENT_S:
                keys = self._rounds.unfinished() if what is _ROUND else [held.key for held in assignments]
                texts.append(wait_text(who, seconds, keys, assignments))
        elif "0" in self._activity:
            doing, since = self._activity["0"]
            if time.monotonic() - since > SILENT_S:
                texts.append(f"learner busy for {time.monotonic() - since:.0f} s: {doing}")
        return texts

    def _ensure_monitoring(self) -> None:
        """Start the monitoring task, or restart it after an error. `__init__` cannot: it has no event loop."""
        if self._monitoring is not None and self._monitoring.done() and not self._monitoring.cancelled():
            self._note_failure(f"monitoring of the actors failed and was restarted: {self._monitoring.exception()}", 1)
            self._monitoring = asyncio.create_task(self._monitor())
        if self._monitoring is None:
            for name, actor in (*self._pools.members().items(), (_STORE, self._store)):
                self._liveness.probe(name, actor)
            self._monitoring = asyncio.create_task(self._monitor())

    async def _monitor(self) -> None:
        while True:
            self._liveness.sweep()
            self._pools.check_outages()
            self._announcer.retry()
            await self._write_status()
            await asyncio.sleep(_STATUS_EVERY_S)

    async def _write_status(self) -> None:
        self._timeline.add_work_spans(self._pools.take_spans())
        self._timeline.write(self._spec.run_dir)
        (await self.status()).write(self._spec.run_dir)

    def _end_hung(self, name: str, actor: Any, seconds: float) -> None:
        if name == _CONTROLLER:
            self._end_controller(actor, seconds)
            return
        self._note_failure(f"{name} was silent for {seconds:.0f} s and is replaced", 1)
        if name.startswith(_RANK):
            self._liveness.forget(name, _CONTROLLER)
        # Ray Train restarts its workers itself.
        ray.kill(actor, no_restart=name.startswith(_RANK))

    def _end_controller(self, actor: Any, seconds: float) -> None:
        """End a hung controller: ranks would train on under it, but their end or death would go unnoticed."""
        # If a rank is silent too, the controller may be busy replacing it.
        if not any(name.startswith(_RANK) for name in self._liveness.silent()):
            self._note_failure(f"{_CONTROLLER} was silent for {seconds:.0f} s and is ended, and `d1 train` with it", 1)
            ray.kill(actor)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Cancels it and raises StoppedError if the run is to stop."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        # A restarted learner repeats its request; `_forget_learner` cancels this one.
        self._pending_requests.add(task)
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            raise StoppedError
        finally:
            self._pending_requests.discard(task)
            task.cancel()
            stop.cancel()


def _members(run: str, begun_with: Mapping[str, Any], names: Collection[str] | None) -> dict[str, Any]:
    """Return the actors of a pool by name: those that the run began with, or after a resize those of `names` that
    exist."""
    if names is None:
        return dict(begun_with)
    found = {}
    for name in names:
        # An actor that cannot be found has ended for good.
        with suppress(ValueError):
            found[name] = begun_with.get(name) or ray.get_actor(actor_name(run, name), namespace=NAMESPACE)
    return found


async def _controller_answers(controller: Any) -> None:
    """Probe Ray Train's controller with an arbitrary call. Raises RayError."""
    await controller.get_training_failed_error.options(max_task_retries=0).remote()


def _since_learner_start(events: list[Event]) -> list[Event]:
    """Return the events since the current learner group started."""
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if event["event"] == "resume" or (event["event"] == "failure" and event["what"].startswith(RESTARTED)):
            return events[index + 1 :]
    return events


def _done_again(events: Sequence[Event], position: Mapping[str, Any]) -> str:
    """Describe what a learner repeats that continues from a position."""
    rounds = max((event["round"] + 1 for event in events if event["event"] == "round"), default=0)
    if rounds > position["round"]:
        return _again("round", position["round"], rounds - 1)
    steps = [event for event in events if event["event"] in ("sft", "phase_end")]
    done = position["step"] or 0
    if steps and steps[-1]["event"] == "sft" and steps[-1]["step"] > done:
        return _again(f"{steps[-1]['phase']} step", done, steps[-1]["step"] - 1)
    return "nothing is repeated"


def _again(what: str, first: int, last: int) -> str:
    return f"{what} {first} is repeated" if first == last else f"{what}s {first} to {last} are repeated"


def _staleness(summaries: Sequence[WorkUnitSummary], newest: int) -> dict[str, float]:
    """Return mean and maximum policy lag: how many versions older than the trained policy the completions were."""
    lags = [newest - version for summary in summaries for version in summary.policy_versions]
    return {"mean_staleness": fmean(lags), "max_staleness": float(max(lags))}
