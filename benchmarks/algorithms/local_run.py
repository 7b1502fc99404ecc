"""Single-process run without Ray: sampling, grading and updating in sequence on one thread.

Each round trains on completions of the current policy, or of one that is `staleness` versions older.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch

from actors.checkpoints.selection import Position
from actors.curriculum import outcomes_of
from actors.grader import GraderWorker
from actors.messages import ScoredWorkUnit
from actors.plan import RunPlan
from actors.spec import Phase, RunSpec, sampler_facts
from actors.training.collate import collate
from actors.training.dynamic_sampling import GroupSelection
from actors.training.sft.data import load_sft_data
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.run_directory import create_run_dir, make_spec
from learner.batch import RolloutBatch
from learner.learner import Learner, Metrics
from learner.model.adapter import read_chain
from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import Transformer
from learner.objectives import DistillationConfig
from learner.parallel.loading import load_by_rows
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig
from learner.parallel.teacher import Teacher
from learner.probes import likelihood_gap
from learner.sft.learner import SftLearner
from rewards.score import Score
from rollout.request import SamplingParams
from rollout.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """State of a run after a round."""

    num_rounds: int
    """Rounds so far."""
    num_completions: int
    """Completions so far."""
    cpu_s: float
    """CPU seconds of sampling, grading and updating so far."""
    metrics: Metrics
    """The learner's metrics."""


def make_sft_checkpoint(recipe: Recipe) -> Path:
    """Return the checkpoint of the recipe's SFT, and train it if it does not exist."""
    spec = make_spec(recipe, Stages.ALL)
    directory = spec.checkpoints_dir / "sft"
    if directory.is_dir():
        return directory
    if not spec.initial_checkpoint.is_dir():
        create_run_dir(recipe, spec, start_from=None).close()
    policy = _load(spec, spec.initial_checkpoint)
    learner = _sft_learner(spec, policy)
    for step in range(spec.sft.num_steps):
        learner.step(step, spec.sft.lr_at(step, step / spec.sft.num_steps))
    position = Position(phase=Phase.SFT, round=0, policy_version=1, rl_seconds=0.0)
    save_checkpoint(
        directory, policy.config, policy.full_weights(), spec.initial_checkpoint, trainer_state=asdict(position)
    )
    return directory


def _sft_learner(spec: RunSpec, policy: ShardedPolicy) -> SftLearner:
    tokenizer = ChatTokenizer(spec.initial_checkpoint)
    documents = load_sft_data(spec, RunPlan(spec, tokenizer), tokenizer).train
    return SftLearner(policy, spec.sft, documents, spec.seed)


def _load(spec: RunSpec, checkpoint: Path) -> ShardedPolicy:
    """Load a policy to train, with a fresh adapter in a LoRA run.

    Adapters of the checkpoint stay frozen and unmerged.
    """
    dtype = torch.bfloat16 if spec.may_hold_base_in_bfloat16 else torch.float32
    chain = read_chain(checkpoint)
    lora, device = spec.model.lora, torch.device("cpu")
    policy = load_by_rows(chain.weights, None, ShardingConfig(), device=device, lora=lora, seed=spec.seed, dtype=dtype)
    policy.reset_adapter(chain.combined)
    return policy


class LocalPolicy:
    """A policy that is trained in this process, and its evaluation."""

    def __init__(self, spec: RunSpec, checkpoint: Path) -> None:
        self._spec = spec
        self._plan = RunPlan(spec, ChatTokenizer(checkpoint))
        self._grader = GraderWorker(spec.task, spec.reward, checkpoint)
        self._trained = _load(spec, checkpoint)
        self.policy = self._trained.module

    def evaluate(self, schedules: Sequence[SamplingParams]) -> dict[str, tuple[Score, float]]:
        """Measure held-out accuracy at temperature 0, and the mean number of denoise steps, by schedule."""
        return {params.schedule_name: score(self.policy, self._plan, self._grader, params) for params in schedules}


class LocalRun(LocalPolicy):
    """Training rounds of a recipe, from a checkpoint."""

    def __init__(self, recipe: Recipe, checkpoint: Path, staleness: int = 0) -> None:
        """Set up a run whose rounds are sampled by the policy of `staleness` rounds before, or by the first one.

        Raises ValueError if the recipe's algorithm cannot learn from such completions.
        """
        super().__init__(make_spec(recipe, Stages.RL), checkpoint)
        self._facts = sampler_facts(self._spec.rollout.params[0], is_fp8=self._spec.rollout.engine.fp8)
        objective, teacher = self._spec.learner.objective, None
        if isinstance(objective, DistillationConfig) and objective.teacher is not None:
            teacher = Teacher.load(objective.teacher, self._trained, objective)
        self.learner = Learner(self._trained, self._spec.learner, self._facts, teacher)
        self._newest: RolloutBatch | None = None
        self._is_stale = staleness > 0
        self._versions = deque([self._version()], maxlen=staleness + 1)

    def rounds(self) -> Iterator[Trained]:
        """Train and yield round after round, without end.

        Raises FloatingPointError if a loss or gradient is not finite.
        """
        num_rounds = num_completions = 0
        spent_s = 0.0
        while True:
            began_s = time.process_time()
            scored = self._round(num_rounds)
            batch = self._batch(scored)
            solved = outcomes_of((one.work_unit.problems, one.grades) for one in scored)
            self._plan.record_outcomes(num_rounds, solved)
            metrics, self._newest = self.learner.update(batch, num_rounds), batch
            self._versions.append(self._version())
            spent_s += time.process_time() - began_s
            num_rounds += 1
            num_completions += sum(len(one.grades) for one in scored)
            yield Trained(
                num_rounds=num_rounds,
                num_completions=num_completions,
                cpu_s=spent_s,
                metrics=metrics,
            )

    def sample(self, round_index: int) -> RolloutBatch:
        """Sample and grade a round of the current policy, without training on it."""
        return self._batch(self._round(round_index))

    def likelihood_gap(self) -> float | None:
        """Return the likelihood gap, in nats per token, of the newest round under the policy that trained on it."""
        assert self._newest is not None, "a round comes first"
        return likelihood_gap(self.learner.policy, self._spec.learner, self._facts, self._newest)

    def _version(self) -> Transformer:
        """Return a snapshot of the current policy, or the policy itself if staleness is 0."""
        return copy.deepcopy(self.policy) if self._is_stale else self.policy

    def _batch(self, scored: Sequence[ScoredWorkUnit]) -> RolloutBatch:
        policy = self.policy.config
        num_slots = self._spec.rollout.sampling.max_slots(is_block_causal=policy.is_block_causal)
        batch = collate(scored, num_slots, policy.stop_ids, GroupSelection.of(self._spec))
        if batch is None:
            raise RuntimeError("no completion of a round could be graded")
        return batch

    def _round(self, round_index: int) -> list[ScoredWorkUnit]:
        """Sample and grade a round's work units in sequence, with extra groups if the recipe uses dynamic sampling."""
        selection, scored, informative = GroupSelection.of(self._spec), list[ScoredWorkUnit](), dict[int, int]()
        while len(scored) < selection.work_units_needed(self._plan.work_unit_sizes(round_index), informative):
            newest = self._scored(round_index, len(scored))
            informative[len(scored)] = selection.num_informative((newest.work_unit.group_ids, newest.grades))
            scored.append(newest)
        return scored

    def _scored(self, round_index: int, index: int) -> ScoredWorkUnit:
        work_unit = self._plan.round_work_unit(round_index, index)
        completions = Sampler(self._versions[0], round_index, self._spec.rollout.engine).generate(work_unit.requests)
        return self._grader.grade(work_unit, completions)[0]


class LocalControl(LocalPolicy):
    """The control: more SFT on the same labels, from the SFT checkpoint. A round is an optimizer step."""

    def __init__(self, recipe: Recipe, checkpoint: Path, cpu_s: float, rate: float = 1.0) -> None:
        """Set up SFT for `cpu_s` CPU seconds, with the recipe's schedule of learning rates times `rate`."""
        super().__init__(make_spec(recipe, Stages.ALL), checkpoint)
        self._cpu_s, self._rate = cpu_s, rate
        self._learner = _sft_learner(self._spec, self._trained)

    def rounds(self) -> Iterator[Trained]:
        """Train and yield step after step, without end. `num_completions` counts the labelled ones.

        Raises FloatingPointError if a loss or gradient is not finite.
        """
        sft, spent_s = self._spec.sft, 0.0
        for step in count():
            began_s = time.process_time()
            progress = spent_s / self._cpu_s if spent_s < self._cpu_s else 1.0
            # The steps continue the count of SFT's, which gives other orders of the labels and other masks.
            metrics = self._learner.step(sft.num_steps + step, self._rate * sft.lr_at(step, progress))
            spent_s += time.process_time() - began_s
            yield Trained(
                num_rounds=step + 1, num_completions=(step + 1) * sft.batch_size, cpu_s=spent_s, metrics=metrics
            )

    def likelihood_gap(self) -> None:
        """Return None: no completion was sampled."""


@torch.no_grad()
def score(policy: Transformer, plan: RunPlan, grader: GraderWorker, params: SamplingParams) -> tuple[Score, float]:
    """Measure held-out accuracy at temperature 0 under `params`, and the mean number of denoise steps."""
    num_correct = num_problems = num_steps = 0
    for work_unit in plan.evaluation_work_units(params, policy.config):
        completions = Sampler(policy, 0).generate(work_unit.requests)
        _, summary = grader.grade(work_unit, completions)
        num_correct += sum(grade.correct for grade in summary.grades)
        num_problems += len(summary.grades)
        num_steps += sum(completion.num_forwards for completion in completions)
    return Score(num_correct=num_correct, num_problems=num_problems), num_steps / num_problems
