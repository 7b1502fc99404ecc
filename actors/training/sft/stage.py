"""SFT stage on one learner worker: before the rounds, and as the control, for as long as they took."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from actors.checkpoints.selection import Position
from actors.plan import RunPlan
from actors.spec import Phase
from actors.training.context import RunContext
from actors.training.limits import Limit, StopRequestedError, Stopwatch, catching_gpu_oom
from actors.training.sft.data import SftData, load_sft_data
from actors.training.sft.samples import completed
from learner.model.checkpoint_files import learner_files
from learner.model.storage.shards import read_shards
from learner.model.tokenizer import ChatTokenizer
from learner.sft.documents import Documents
from learner.sft.learner import SftLearner, evaluation_loss

_LOG_EVERY_S = 1.0


def run_sft(context: RunContext) -> None:
    """Train on the demonstrations, from the initial checkpoint."""
    data = labels(context)
    if not context.resumes(Phase.SFT):
        context.record("sft_data", **data.facts)
    SftSteps(context, data, Phase.SFT, Limit(num_steps=context.spec.sft.num_steps)).run()
    context.finish(Position(phase=Phase.SFT, round=0, policy_version=1, rl_seconds=0.0))


def run_control(context: RunContext) -> None:
    """Continue SFT on the same labels from where the rounds began, for the rounds' seconds or for a number of steps."""
    spec, rounds = context.spec, context.position
    if not context.resumes(Phase.CONTROL):
        if spec.model.lora.rank:
            context.begin_adapter(Phase.CONTROL)
        else:
            context.policy.load_full_weights(context.start_weights(Phase.CONTROL))
    limit = Limit(num_steps=spec.control.num_steps, seconds=0.0 if spec.control.num_steps else rounds.rl_seconds)
    # Its steps continue the count of SFT's, which gives other orders of the labels and other masks.
    SftSteps(context, labels(context), Phase.CONTROL, limit, spec.sft.num_steps).run()
    context.finish(
        Position(
            phase=Phase.CONTROL,
            round=rounds.round,
            policy_version=rounds.policy_version + 1,
            rl_seconds=rounds.rl_seconds,
        )
    )


def labels(context: RunContext) -> SftData:
    """Return the run's demonstrations, which rank 0 reads: other machines need not have them. A collective."""
    spec = context.spec
    tokenizer = ChatTokenizer(spec.initial_checkpoint)

    def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
        data = load_sft_data(spec, RunPlan(spec, tokenizer), tokenizer)
        return data.facts, data.tensors()

    facts, tensors = context.ranks.broadcast_tensors(read)
    return SftData.of(facts, tensors, tokenizer)


class SftSteps:
    """Optimizer steps of SFT or the control, with their evaluations and checkpoints."""

    def __init__(self, context: RunContext, data: SftData, phase: Phase, limit: Limit, first_step: int = 0) -> None:
        """Resume from a checkpoint within `phase`, or begin at its first step.

        Args:
            context: the run.
            data: the examples.
            phase: the stage.
            limit: when the stage ends.
            first_step: offset of the step numbers that key orders and masks: the steps of other stages.
        """
        self._context, self._data, self._phase, self._limit, self._first_step = context, data, phase, limit, first_step
        self._began_at = context.position
        self._learner = SftLearner(context.policy, context.spec.sft, data.train, context.spec.seed)
        self._step = 0
        if context.resumes(phase):
            self._learner.load_full_state(read_shards(learner_files(context.found.directory)))
            self._step = context.position.step or 0
        self._evaluated_step = self._step
        self._seconds = context.position.stage_seconds
        self._logged_at, self._logged_tokens = 0.0, 0

    def run(self) -> None:
        """Train until the stage has ended. Evaluations and checkpoints do not count towards its seconds."""
        context, began_at = self._context, self._began_at
        context.learner = self._learner
        facts: dict[str, float] = {"from_step": self._step} if self._step else {}
        if self._limit.seconds:
            facts |= {"limit_s": self._limit.seconds, "spent_s": round(self._seconds, 3)}
        context.record("phase", phase=self._phase, num_steps=self._limit.num_steps, **facts)
        if not self._step:
            self._evaluate_loss()
        watch = Stopwatch(context.clock, began_at.stage_seconds)
        self._logged_at = context.clock()
        while (progress := self._progress(watch)) < 1:
            self._take_step(progress)
            every = context.spec.sft.eval_every_steps
            if every and self._step % every == 0:
                with watch.paused():
                    self._evaluate_loss()
                self._logged_at = context.clock()
        context.learner = None
        if self._step != self._evaluated_step:
            self._evaluate_loss()
        context.record("phase_end", phase=self._phase, seconds=round(self._seconds, 3), num_steps=self._step)

    def _progress(self, watch: Stopwatch) -> float:
        """Return the completed share of the stage. If a step follows, first write the checkpoint that is due.

        Raises StopRequestedError if the run must stop before that step.
        """
        context = self._context
        context.pulse.doing = f"{self._phase}, step {self._step}"
        decision = context.decide(watch.seconds)
        self._seconds = decision.seconds
        if self._step:
            context.position = replace(
                self._began_at, phase=self._phase, step=self._step, stage_seconds=decision.seconds
            )
        progress = self._limit.progress(self._step, decision.seconds)
        if progress < 1 and decision.must_stop:
            raise StopRequestedError
        if progress < 1:
            with watch.paused():
                if decision.must_save and self._step:
                    context.save()
        return progress

    def _take_step(self, progress: float) -> None:
        # A checkpoint may have been written since.
        self._context.pulse.doing = f"{self._phase}, step {self._step}"
        rate = self._context.spec.sft.lr_at(self._step, progress)
        with catching_gpu_oom("sft", f"{self._phase}, step {self._step}", self._context.ranks.rank):
            metrics = self._learner.step(self._first_step + self._step, rate)
        self._step += 1
        if self._step == self._limit.num_steps or self._context.clock() - self._logged_at > _LOG_EVERY_S:
            self._log(metrics)

    def _log(self, metrics: dict[str, float]) -> None:
        now = self._context.clock()
        rate = round((self._learner.num_trained - self._logged_tokens) / (now - self._logged_at), 1)
        self._context.record("sft", phase=self._phase, step=self._step, **metrics, tokens_per_s=rate)
        self._logged_at, self._logged_tokens = now, self._learner.num_trained

    def _evaluate_loss(self) -> None:
        """Compute and record the loss on the held-out examples."""
        self._evaluated_step = self._step
        if self._data.held_out is not None:
            sft = self._context.spec.sft
            evaluated = evaluation_loss(
                self._context.policy, self._data.held_out, sft.batch_size, sft.micro_batch_tokens
            )
            self._context.record("sft_eval", phase=self._phase, step=self._step, **asdict(evaluated))
            if sft.num_samples:
                self._record_samples(self._data.held_out)

    def _record_samples(self, held_out: Documents) -> None:
        """Generate and record completions of a few held-out prompts."""
        context = self._context
        samples = completed(context.policy, held_out, context.spec, self._data.tokenizer)
        context.record("sft_samples", phase=self._phase, step=self._step, samples=samples)
