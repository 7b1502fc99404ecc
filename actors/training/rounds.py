"""RL rounds on one learner worker: pull a round's batch, update the policy, publish the next version.

A batch is of graded completions, or of stored preference pairs. With these the coordinator's rounds have no work units,
and its answers only pace the run: stops, background evaluations, and the record of the round before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from actors.checkpoints.selection import Position
from actors.messages import Next, ScoredWorkUnit
from actors.spec import Phase, sampler_facts
from actors.training.collate import collate
from actors.training.context import RunContext
from actors.training.dynamic_sampling import GroupSelection
from actors.training.limits import StopRequestedError
from actors.training.pairs import PairBatches, load_pairs
from actors.training.round_update import RoundUpdate
from learner.batch import RolloutBatch
from learner.estimators import SamplerFacts
from learner.learner import Learner
from learner.model.checkpoint_files import learner_files
from learner.model.storage.shards import read_shards
from learner.model.tokenizer import ChatTokenizer
from learner.objectives import DistillationConfig
from learner.parallel.teacher import Teacher


def run_rounds(context: RunContext) -> None:
    """Run all remaining rounds, starting from the SFT checkpoint or the initial one."""
    num_rounds = context.spec.learner.num_rounds
    pairs = _load_pairs(context)
    learner = _make_learner(context)
    context.learner_tensors = learner.tensors
    context.record("phase", phase=Phase.RL, num_steps=num_rounds)
    rounds = Rounds(context, RoundUpdate(context, learner), pairs)
    for round_index in range(context.position.round, num_rounds):
        rounds.run(round_index)
        context.learner = learner
        context.collect_evaluation()
        if round_index + 1 < num_rounds:
            _between_rounds(context)
    context.record("phase_end", phase=Phase.RL, seconds=context.position.rl_seconds, num_steps=num_rounds)
    context.save()
    context.learner = None
    context.evaluate()
    context.learner_tensors = tuple


def _make_learner(context: RunContext) -> Learner:
    """Create the learner for the first round, or restore it for the round at which a run resumes."""
    spec, has_begun = context.spec, context.position.phase is Phase.RL
    if spec.model.lora.rank and not has_begun:
        # RL has its own adapter: the policy without it is the KL reference.
        context.begin_adapter(Phase.RL)
    learner = Learner(context.policy, spec.learner, _facts(context), _teacher(context))
    if has_begun:
        _restore(context, learner)
    return learner


def _facts(context: RunContext) -> SamplerFacts:
    """Return how the completions of the rounds are sampled; stored ones have no record that replays."""
    spec = context.spec
    facts = sampler_facts(
        spec.rollout.params[0],
        is_block_causal=context.policy.config.is_block_causal,
        is_fp8=spec.rollout.engine.fp8,
    )
    return facts if spec.learner.pairs is None else replace(facts, has_reproducible_logps=False)


def _load_pairs(context: RunContext) -> PairBatches | None:
    """Load the stored pairs on rank 0, which sends each round's to the others; None there, and without pairs."""
    spec, batches = context.spec, list[PairBatches]()
    if spec.learner.pairs is None:
        return None

    def load() -> dict[str, Any]:
        data = load_pairs(spec, ChatTokenizer(spec.initial_checkpoint))
        batches.append(PairBatches(spec, data, context.policy.config, _facts(context)))
        return data.facts

    context.pulse.doing = "reading the preference pairs"
    facts = context.ranks.broadcast_decision(load)
    if context.position.phase is not Phase.RL:
        context.record("pairs", **facts)
    return batches[0] if batches else None


def _teacher(context: RunContext) -> Teacher | None:
    """Load the objective's teacher, if it needs one. Raises ValueError if its checkpoint cannot be read."""
    objective = context.spec.learner.objective
    if not isinstance(objective, DistillationConfig) or not objective.needs_teacher:
        return None
    context.pulse.doing = "loading the teacher"
    directory = objective.teacher or context.spec.initial_checkpoint
    return Teacher.load(directory, context.policy, objective)


def _restore(context: RunContext, learner: Learner) -> None:
    """Restore the optimizer and the KL reference of an interrupted run."""
    if learner.reference is not None:
        learner.reference.load_full_weights(context.start_weights(Phase.RL))
    learner.load_full_state(read_shards(learner_files(context.found.directory)))


def _between_rounds(context: RunContext) -> None:
    """Between two rounds, checkpoint and evaluate if the recipe or the clock requires it.

    It is not called after the last round, which ends the stage. Raises StopRequestedError if the run must stop.
    """
    decision = context.decide(lambda: context.position.rl_seconds)
    every, must_evaluate = context.spec.checkpoint_every_rounds, context.evaluator.is_due(context.position)
    must_save = must_evaluate or decision.must_save or (every and context.position.round % every == 0)
    if must_save or decision.must_stop:
        # Report the round first. What follows may take long, and neither observers nor samplers that may continue wait
        # for it.
        context.ranks.on_rank_0(context.client.report_round)
    if must_save:
        context.save()
    if decision.must_stop:
        raise StopRequestedError
    if must_evaluate:
        context.evaluate_in_background()


class Rounds:
    """Executor of single rounds."""

    def __init__(self, context: RunContext, update: RoundUpdate, pairs: PairBatches | None = None) -> None:
        """Train with `update`: on stored `pairs`, which rank 0 has, or without them on sampled completions."""
        self._context, self._update, self._pairs = context, update, pairs

    def run(self, round_index: int) -> None:
        """Run one round: sample, update, publish the version, and report it for the run log."""
        context = self._context
        began = context.clock()
        context.pulse.doing = f"round {round_index}: waiting for completions"
        batch, work_units = self._pull(round_index)
        sampled = context.clock()
        context.pulse.doing = f"round {round_index}: training"
        metrics = self._update.run(batch, round_index)
        trained = context.clock()
        version = context.position.policy_version + 1
        context.publisher.publish(version, Phase.RL, round_index + 1)

        def report_round() -> float:
            published = context.clock()
            seconds = {"sampling_s": sampled - began, "training_s": trained - sampled, "publish_s": published - trained}
            values = metrics | {name: round(value, 4) for name, value in seconds.items()}
            context.client.published(round_index, context.publisher.newest, values, work_units)
            return round(context.position.rl_seconds + context.clock() - began, 3)

        rl_seconds = context.ranks.broadcast_decision(report_round)
        context.position = Position(
            phase=Phase.RL, round=round_index + 1, policy_version=version, rl_seconds=rl_seconds
        )

    def _pull(self, round_index: int) -> tuple[RolloutBatch | None, list[ScoredWorkUnit]]:
        """Return a round's batch, or None if nothing of it is trainable; and on rank 0 its scored work units."""
        context, work_units = self._context, list[ScoredWorkUnit]()

        def ask() -> tuple[Next, Mapping[str, Tensor]]:
            background = context.evaluator.background
            label = "" if background is None else background.label
            what, work_units[:] = context.client.next_batch(round_index, context.publisher.newest, label)
            batch = self._batch(round_index, work_units) if what is Next.CONTINUE else None
            return what, {} if batch is None else batch.given()

        tensors = context.publisher.request_with_republish(lambda: context.ranks.broadcast_tensors(ask))
        return RolloutBatch(**tensors) if tensors else None, work_units

    def _batch(self, round_index: int, work_units: Sequence[ScoredWorkUnit]) -> RolloutBatch | None:
        if self._pairs is not None:
            return self._pairs.of_round(round_index)
        sampling, policy = self._context.spec.rollout.sampling, self._context.policy.config
        num_slots = sampling.max_slots(is_block_causal=policy.is_block_causal)
        return collate(work_units, num_slots, policy.stop_ids, GroupSelection.of(self._context.spec))
