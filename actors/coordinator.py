"""The coordinator: a thin asynchronous shell over the ledger.

    samplers <-- portions -- [ coordinator: ledger, run log ] -- references --> learner
        |                         ^ summaries                                     |
        '---- completions ---> graders                       <-- next_batch, published, record

| loop          | consumes             | waits for              | produces           | unblocked by         |
|---------------|----------------------|------------------------|--------------------|----------------------|
| `_run`        | an admitted portion  | a free sampler, grader | a ready portion    | `published`, a retry |
| `next_batch`  | a round's portions   | the round is complete  | references         | `_run`               |
| `evaluate`    | held-out portions    | all of them            | a Score            | `Pools.score`        |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import ray

from actors.ledger import Ledger
from actors.messages import Generation, Portion, PortionKey, PortionSummary
from actors.metrics import RunGauges
from actors.plan import RunPlan
from actors.pools import Pools, PortionFailedError
from actors.registry import PolicyVersion, Registry
from actors.registry_files import rebuild
from actors.round_stats import readable_samples, round_stats
from actors.run_log import RESTARTED, Event, RunLog, began_at
from actors.spec import Phase, RunSpec
from learner.model.tokenizer import ChatTokenizer
from rewards import Outcome
from rollout.score import Score

_SAMPLES_PER_ROUND = 4


class Coordinator:
    """Owns the ledger and the run log of one run."""

    def __init__(
        self, spec: RunSpec, samplers: Sequence[Any], graders: Sequence[Any], registry_url: str, store_name: str
    ) -> None:
        """Raises ValueError when the task cannot give the problems that the recipe asks for."""
        self._spec = spec
        self._plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
        self._pools = Pools(samplers, graders, spec.rollout.timeout_s, spec.grading_timeout_s, self._note_pause)
        self._log = RunLog(spec.run_dir, spec.wandb_project)
        self._gauges = RunGauges(spec.name)
        self._registry = Registry(registry_url, spec.name)
        self._store_name = store_name
        self._announced: PolicyVersion | None = None
        self._ledger: Ledger | None = None
        self._scored: dict[PortionKey, tuple[ray.ObjectRef[Any], PortionSummary]] = {}
        self._num_learner_starts = 0
        self._paused_at_s = 0.0
        self._last_failure = ""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        if self._plan.num_overlong:
            self._log.append("failure", what=f"{self._plan.num_overlong} prompts are too long", attempt=0)

    # The log.

    async def record(self, event: str, values: dict[str, Any]) -> None:
        """Append an event to the run log; the registry hears of a checkpoint that may be served."""
        self._log.append(event, **values)
        if event == "checkpoint" and values["phase"] != Phase.CONTROL:
            directory = str(self._spec.run_dir / values["path"])
            await self._tell_registry(self._registry.add_checkpoint, values["policy_version"], directory)

    async def events_since(self, count: int) -> list[Event]:
        """The events after the first `count`."""
        return self._log.events_since(count)

    async def learner_started(self, checkpoint: str) -> None:
        """The learner group is up, from a checkpoint. Every time but the first is a restart, and is recorded."""
        if self._num_learner_starts:
            what = f"{RESTARTED} from checkpoint {checkpoint}"
            self._log.append("failure", what=what, attempt=self._num_learner_starts)
        self._num_learner_starts += 1

    def _note_pause(self, why: str | None) -> None:
        """Record that grading waits for something that does not answer, or (None) that it goes on."""
        if why is None:
            self._log.append("pause_end", seconds=round(self._log.seconds() - self._paused_at_s, 3))
        else:
            self._paused_at_s = self._log.seconds()
            self._log.append("pause", what=why)

    # The rounds.

    async def start_rounds(self, first_round: int, version: int) -> None:
        """Begin, or after a restart of the learner rewind to, `first_round`, trained from `version`."""
        for task in self._tasks:
            task.cancel()
        self._scored.clear()
        self._ledger = Ledger(
            num_rounds=self._spec.learner.num_rounds,
            portions_per_round=self._plan.portions_per_round,
            max_staleness=self._spec.learner.max_staleness,
            max_attempts=self._spec.rollout.max_attempts,
            next_round=first_round,
            version=version,
        )

    async def next_batch(self, round_index: int) -> list[ray.ObjectRef[Any]]:
        """References of a round's scored portions, once all are in.

        Raises:
            TimeoutError: nothing came back for longer than a portion's tries may take, and nothing is waited for.
            RuntimeError: every portion of the round failed.
        """
        ledger = self._active_ledger()
        # Now and not when the last round was published: what the learner did in between, an evaluation or a
        # checkpoint, is not a part of this round, and its sampling is.
        self._start_portions()
        patience_s = self._spec.rollout.timeout_s + self._spec.grading_timeout_s
        async with self._changed:
            while not ledger.is_complete(round_index):
                try:
                    await asyncio.wait_for(self._changed.wait(), patience_s)
                except TimeoutError as error:
                    if self._pools.is_paused:
                        continue
                    raise TimeoutError(
                        f"round {round_index}: no portion came back for {patience_s:.0f} s "
                        f"({ledger.num_running()} running); are all samplers placed?"
                    ) from error
        ready = ledger.ready(round_index)
        if not ready:
            raise RuntimeError(f"round {round_index} has no completions: all its portions failed. {self._last_failure}")
        return [self._scored[key][0] for key in ready]

    async def published(self, round_index: int, version: int, values: dict[str, Any]) -> None:
        """The learner trained on a round and published `version`; `values` is what it measured."""
        ledger = self._active_ledger()
        keys = ledger.ready(round_index)
        summaries = [self._scored[key][1] for key in keys]
        portions = [self._plan.round_portion(key.round, key.index) for key in keys]
        stats = round_stats(portions, summaries, self._spec.learner.groups_per_round)
        seconds = values["sampling_s"] + values["training_s"] + values["publish_s"]
        event = self._log.append(
            "round",
            round=round_index,
            policy_version=version,
            **stats,
            num_retries=ledger.num_retries,
            pools=self._pools.use(),
            **_staleness(summaries, version - 1),
            **values,
            tokens_per_s=round(stats["mean_tokens"] * stats["num_completions"] / seconds, 1),
        )
        samples = readable_samples(portions, summaries, self._plan.prompt_text)
        self._log.append_samples(samples[:: max(1, len(samples) // _SAMPLES_PER_ROUND)][:_SAMPLES_PER_ROUND])
        self._gauges.show(event)
        for key in keys:
            del self._scored[key]
        ledger.publish(round_index, version)

    # Versions and their scores.

    async def announce(self, version: int, phase: Phase, round_index: int, manifest_digest: str) -> None:
        """Tell the registry, and so the service, that the store has a new version."""
        self._announced = PolicyVersion(
            version=version,
            round=round_index,
            phase=phase,
            num_correct=None,
            num_problems=None,
            checkpoint=None,
            weight_store=self._store_name,
            manifest_digest=manifest_digest,
        )
        began = began_at(self._log.events_since(0))
        knew_any = await self._tell_registry(self._registry.announce, self._announced, began)
        if knew_any is False:
            # New, or Redis has lost its data: the registry gets what the run directory says.
            await self._tell_registry(rebuild, self._registry, self._spec.run_dir)

    async def evaluate(self, version: int, label: str, round_index: int, is_new: bool) -> None:
        """Held-out accuracy of a version that the store has; recorded, and announced if the version is public.

        Of a version that is not new, an evaluation that the log has is not repeated.
        Raises RuntimeError when a portion cannot be scored: an accuracy over fewer problems would be another number.
        """
        if not is_new and self._has_evaluation(version, label):
            return
        portions = self._plan.evaluation_portions(self._spec.rollout.sampling)
        tries = [self._score_with_retries(version, portion) for portion in portions]
        summaries = await asyncio.gather(*tries)
        grades = [grade for summary in summaries for grade in summary.grades]
        score = Score(num_correct=sum(grade.correct for grade in grades), num_problems=len(grades))
        self._log.append(
            "evaluation",
            label=label,
            policy_version=version,
            round=round_index,
            num_correct=score.num_correct,
            num_problems=score.num_problems,
            num_ungraded=sum(grade.outcome is not Outcome.GRADED for grade in grades),
            items_right=sum(grade.score[0] for grade in grades),
            num_items=sum(grade.score[1] for grade in grades),
        )
        if self._announced is not None and self._announced.version == version:
            await self._tell_registry(self._registry.score, version, score.num_correct, score.num_problems)

    def _has_evaluation(self, version: int, label: str) -> bool:
        evaluations = [event for event in self._log.events_since(0) if event["event"] == "evaluation"]
        return any((event["label"], event["policy_version"]) == (label, version) for event in evaluations)

    async def _tell_registry(self, call: Callable[..., Any], *facts: Any) -> Any:
        """What `call` returns, or None: the registry is never the only copy, so a run goes on without, and says so."""
        try:
            return await asyncio.to_thread(call, *facts)
        except (ConnectionError, ValueError) as error:
            self._log.append("failure", what=str(error), attempt=1)
            return None

    async def finish(self) -> None:
        """Record that the run is done, and how long it took; the files are complete then."""
        self._log.append("done", seconds=self._log.seconds())
        self._log.close()

    def _generation_of(self, version: int) -> Generation:
        return Generation(version=version, learner_start=self._num_learner_starts)

    def _active_ledger(self) -> Ledger:
        if self._ledger is None:
            raise RuntimeError("start_rounds comes before the first round")
        return self._ledger

    def _start_portions(self) -> None:
        ledger = self._active_ledger()
        while (started := ledger.start_next()) is not None:
            task = asyncio.create_task(self._run(ledger, *started))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, ledger: Ledger, key: PortionKey, version: int) -> None:
        """One try of one portion."""
        try:
            portion = self._plan.round_portion(key.round, key.index)
            scored = await self._pools.score(self._generation_of(version), portion)
        except PortionFailedError as error:
            self._last_failure = str(error)
            self._log.append("failure", what=str(error), attempt=ledger.fail(key))
            self._start_portions()
        else:
            for what in scored[1].failures:
                self._log.append("failure", what=what, attempt=1)
            if ledger.finish(key):
                self._scored[key] = scored
        async with self._changed:
            self._changed.notify_all()

    async def _score_with_retries(self, version: int, portion: Portion) -> PortionSummary:
        for attempt in range(1, self._spec.rollout.max_attempts + 1):
            try:
                _, summary = await self._pools.score(self._generation_of(version), portion)
                if not summary.failures:
                    return summary
                raise PortionFailedError(summary.failures[0])
            except PortionFailedError as error:
                self._log.append("failure", what=str(error), attempt=attempt)
                last = error
        raise RuntimeError(f"the evaluation failed {self._spec.rollout.max_attempts} times: {last}") from last


def _staleness(summaries: Sequence[PortionSummary], newest: int) -> dict[str, float]:
    """How many versions older than the policy that trained on them the completions were."""
    lags = [newest - version for summary in summaries for version in summary.policy_versions]
    return {"mean_staleness": fmean(lags), "max_staleness": float(max(lags))}
