"""The RL learner: policy-gradient updates on graded completions.

An ordinary class, run by a single process or by every rank. Every rank receives the same batch, trains on its share of
the rows and returns the same metrics. Estimators, objectives and advantages are known by their interfaces only.
Gradients accumulate over micro-batches and equal those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, Terms, token_logps
from learner.flops import forward_flops, update_flops
from learner.imitation import DENOISING_LOSS, demonstrations
from learner.model.lora_config import FULL_FINE_TUNING
from learner.objectives import DistillationConfig, Loss
from learner.optimizer import PolicyOptimizer
from learner.parallel.micro_batches import loss_gradient
from learner.parallel.self_teacher import SelfTeacher
from learner.parallel.sharded_tensors import Rows, gather_on_rank_0
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.teacher import Teacher
from learner.probes import mask_variance, sampling_gap
from learner.round import WEIGHING, Round, StepPlan, concatenate_values, scored_logps
from learner.update_metrics import UpdateMetrics, batch_metrics
from learner.value.model import ValueModel, ValueTargets

Metrics = dict[str, float]


@dataclass(slots=True)
class CachedLogps:
    """Cached old and reference log-probabilities [N] of a plan's terms, constant within a round."""

    old: Tensor | None = None
    reference: Tensor | None = None


class Learner:
    """The learner of stage 2 on one rank.

    The reference is a frozen copy of the policy. Under LoRA it is the policy with its adapter off, and needs no copy.
    """

    def __init__(
        self,
        policy: ShardedPolicy,
        config: LearnerConfig,
        sampler: SamplerFacts | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepare to train `policy` on completions of such a `sampler`.

        `teacher` is the autoregressive teacher of distillation; None: the current policy with causal attention, or the
        reference if the objective makes the policy its own teacher.
        Raises ValueError if the algorithm cannot learn from such completions.
        """
        self.policy = policy
        self.config = config
        self._sampler = sampler or SamplerFacts()
        incompatibility = config.incompatibility(self._sampler)
        if incompatibility is not None:
            raise ValueError(f"learner.{incompatibility}")
        self.optimizer = PolicyOptimizer(policy, betas=config.betas, weight_decay=config.weight_decay)
        self.model_flops = 0.0
        """Model FLOP (`learner/flops.py`) of the last update, summed over ranks, without probes."""
        self._flops = 0.0
        self.reference: ShardedPolicy | None = None
        if config.objective.needs_reference and not policy.lora.rank:
            self.reference = policy.frozen_copy()
        self.teacher: Teacher | SelfTeacher | None = None
        if isinstance(config.objective, DistillationConfig):
            self.teacher = (
                teacher or Teacher.of_policy(policy, config.objective)
                if config.objective.needs_teacher
                else SelfTeacher(policy, self.reference, config.objective, self._sampler)
            )
        self.value = None if config.value is None else ValueModel(policy, config)

    def update(self, batch: RolloutBatch, round_index: int) -> Metrics:
        """Train on one round: `inner_updates` sweeps through it, of `num_minibatches` optimizer steps each.

        Old likelihoods are those of the policy at the start of the round, under the same masks as the new ones.
        If the filters leave nothing of a round, the policy stays as it is and `num_trained_completions` is 0.
        Raises FloatingPointError if the loss or the gradient of a step is not finite. Policy and optimizer are then
        bit-identical to those at the start of the round, and training can continue.
        """
        lr = self.config.lr_at(round_index)
        metrics = UpdateMetrics(self.policy)
        work = Round(self.policy, self.config, self._sampler, batch, index=round_index)
        probed = sampling_gap(self.policy, self.config, self._sampler, batch)
        self._flops = 0.0
        if work.num_rows:
            probed |= mask_variance(self.policy, self.config, self._sampler, batch)
            self._train(work, batch, metrics, round_index)
        self.model_flops = self.policy.sum_over_ranks(torch.tensor([self._flops], dtype=torch.float64)).item()
        return (
            batch_metrics(batch)
            | probed
            | metrics.means()
            | {"learning_rate": lr, "num_trained_completions": float(work.num_rows)}
        )

    def sync_reference(self, round_index: int) -> None:
        """Copy the policy into the reference every `reference_sync_rounds` rounds, also after skipped rounds."""
        every = self.config.reference_sync_rounds
        if self.reference is not None and every and (round_index + 1) % every == 0:
            self.reference.copy_weights_from(self.policy)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that this rank keeps between updates, except the policy's."""
        yield from self.optimizer.tensors()
        if self.reference is not None:
            yield from self.reference.tensors()
        if isinstance(self.teacher, Teacher):
            yield from self.teacher.model.tensors()
        if self.value is not None:
            yield from self.value.tensors()

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs besides the weights: the optimizer, a synced reference, and the value model.

        They are the live tensors, sharded as the policy.
        """
        state = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.reference is not None and self.config.reference_sync_rounds:
            state |= {f"reference/{name}": tensor for name, tensor in self.reference.weights.items()}
        if self.value is not None:
            state |= {f"value/{name}": tensor for name, tensor in self.value.state().items()}
        return state

    def full_state(self) -> dict[str, Tensor]:
        """Gather the same, whole, on rank 0's CPU; it is empty on the others. A collective."""
        return gather_on_rank_0(self.policy.rank, self.state())

    def load_full_state(self, state: Mapping[str, Rows]) -> None:
        """Restore the whole state, each rank its rows."""
        parts: dict[str, dict[str, Rows]] = {"optimizer": {}, "reference": {}, "value": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.optimizer.load_full_state(parts["optimizer"])
        if self.reference is not None and parts["reference"]:
            self.reference.load_full_weights(parts["reference"])
        if self.value is not None and parts["value"]:
            self.value.load_full_state(parts["value"])

    def _train(self, work: Round, batch: RolloutBatch, metrics: UpdateMetrics, round_index: int) -> None:
        """Take all steps of a round, or none."""
        minibatches, lr = work.minibatches(), self.config.lr_at(round_index)
        if self.config.objective.precomputes_row_weights:
            self._weigh_rows(minibatches)
        targets = self._value_targets(minibatches, metrics)
        cached = self._precomputed_logps(minibatches)
        correct: list[Round] = []
        if self.config.imitation_coef and bool(batch.correct.any()):
            correct = demonstrations(self.policy, self.config, self._sampler, batch).minibatches()
        num_steps = self.config.inner_updates * len(minibatches)
        with ExitStack() as undone:
            # A single step that fails is not taken.
            if num_steps > 1 or self.value is not None:
                undone.enter_context(self.optimizer.rollback())
            if self.value is not None:
                undone.enter_context(self.value.optimizer.rollback())
            for index in range(self.config.inner_updates):
                for place, some in enumerate(minibatches):
                    plan = some.plan(index)
                    # There may be fewer correct completions than steps.
                    imitated = correct[place] if place < len(correct) else None
                    known = cached[place].setdefault(plan.key, CachedLogps())
                    self._backward(some, plan, known, metrics, is_last=imitated is None)
                    if imitated is not None:
                        self._backward_imitation(imitated, index, metrics)
                    step = self.optimizer.step(lr, self.config.max_grad_norm, metrics.pop_loss())
                    metrics.add_step(step.grad_norm)
                    if self.value is not None:
                        self._flops += update_flops(self.value.shape, self.policy.lora, plan.canvases)
                        metrics.add_value_step(self.value.step(plan, targets[place], round_index))

    def _value_targets(self, minibatches: list[Round], metrics: UpdateMetrics) -> list[ValueTargets]:
        if self.value is None:
            return []
        plans = (some.plan(0) for some in minibatches)
        self._flops += sum(forward_flops(self.value.shape, self.policy.lora, plan.canvases).total for plan in plans)
        targets, found = self.value.set_targets(minibatches)
        metrics.set_value_metrics(found)
        return targets

    def _weigh_rows(self, minibatches: list[Round]) -> None:
        for some in minibatches:
            plan = some.plan(WEIGHING)
            self._count_forward(plan)
            some.weigh_rows(self._of_reference(plan) - scored_logps(self.policy, plan))

    def _precomputed_logps(self, minibatches: list[Round]) -> list[dict[int, CachedLogps]]:
        """Compute old and reference likelihoods of all canvases that the first step does not run.

        They are returned for each minibatch, by mask key. At the first step the policy still is the old one, so its own
        forward gives the old likelihood for free.
        """
        cached: list[dict[int, CachedLogps]] = [{} for _ in minibatches]
        if self.config.objective.needs_old:
            first = minibatches[0].plan(0).key
            for place, some in enumerate(minibatches):
                for index in range(self.config.inner_updates):
                    plan = some.plan(index)
                    if plan.key in cached[place] or (place == 0 and plan.key == first):
                        continue
                    self._count_forward(plan)
                    old_N = scored_logps(self.policy, plan)
                    cached[place][plan.key] = CachedLogps(old=old_N, reference=self._reference_logps(plan))
        return cached

    def _backward(
        self, work: Round, plan: StepPlan, cached: CachedLogps, metrics: UpdateMetrics, *, is_last: bool
    ) -> None:
        """Accumulate the gradient of one step, and cache the likelihoods that later steps of its plan need.

        `is_last`: whether nothing else is accumulated in this step.
        """
        if cached.reference is None:
            cached.reference = self._reference_logps(plan)
        self._flops += update_flops(self.policy.config, self.policy.lora, plan.canvases)
        if self.teacher is not None:
            self._flops += self.teacher.flops(plan.terms, work.on_host) * any(plan.counts)
        if plan.is_split:
            self._in_two_sweeps(work, plan, cached, metrics, is_last=is_last)
        else:
            self._in_one_sweep(work, plan, cached, metrics, is_last=is_last)

    def _backward_imitation(self, correct: Round, index: int, metrics: UpdateMetrics) -> None:
        """Accumulate the gradient of the denoising loss of the correct completions."""
        plan = correct.plan(index)
        self._flops += update_flops(self.policy.config, self.policy.lora, plan.canvases)
        for micro, counts, is_last in zip(plan.micro_batches, plan.counts, plan.ends, strict=True):
            new_N = self._logps(micro)
            logps = correct.logps(micro, new_N, new_N.detach(), None)
            loss = DENOISING_LOSS.loss(micro, logps, correct.rows).total
            self.policy.backward(self.config.imitation_coef * loss, is_last=is_last)
            metrics.add_imitation(loss, self.config.imitation_coef, counts=counts)
        metrics.end_imitation()

    def _in_one_sweep(
        self, work: Round, plan: StepPlan, cached: CachedLogps, metrics: UpdateMetrics, *, is_last: bool
    ) -> None:
        news = []
        parts = zip(plan.micro_batches, plan.term_slices, plan.counts, plan.ends, strict=True)
        for micro, inside, counts, ends in parts:
            new_N = self._values(work, micro)
            news.append(new_N.detach())
            loss = self._loss(work, micro, new_N, cached, inside)
            self.policy.backward(loss.total, is_last=is_last and ends)
            metrics.add(loss, self._token_logps(micro, new_N), counts=counts)
        if cached.old is None:
            cached.old = concatenate_values(news, plan)

    def _in_two_sweeps(
        self, work: Round, plan: StepPlan, cached: CachedLogps, metrics: UpdateMetrics, *, is_last: bool
    ) -> None:
        """Compute the derivative of the loss by each log-probability first, then backpropagate it by micro-batch."""
        all_N = scored_logps(self.policy, plan, partial(self._values, work))
        if cached.old is None:
            cached.old = all_N
        whole = slice(0, plan.terms.num_terms)
        gradient_N = loss_gradient(lambda new_N: self._loss(work, plan.terms, new_N, cached, whole).total, all_N)
        loss = self._loss(work, plan.terms, all_N, cached, whole)
        metrics.add(loss, self._token_logps(plan.terms, all_N), counts=any(plan.counts))
        for micro, inside, ends in zip(plan.micro_batches, plan.term_slices, plan.ends, strict=True):
            new_N = self._values(work, micro)
            weight_N = gradient_N[inside] if inside.stop > inside.start else torch.zeros_like(new_N)
            self.policy.backward((new_N * weight_N).sum(), is_last=is_last and ends)

    def _loss(self, work: Round, terms: Terms, new_N: Tensor, cached: CachedLogps, inside: slice) -> Loss:
        is_idle = inside.stop == inside.start
        old_N = new_N.detach() if cached.old is None or is_idle else cached.old[inside]
        reference_N = cached.reference
        if reference_N is not None:
            reference_N = new_N.detach() if is_idle else reference_N[inside]
        return self.config.objective.loss(terms, work.logps(terms, new_N, old_N, reference_N), work.rows)

    def _values(self, work: Round, micro: Terms) -> Tensor:
        """Compute the objective's inputs [N]: log-probabilities, or divergences from the teacher."""
        if self.teacher is None:
            return self._logps(micro)
        states = self.teacher.states(micro, work.on_host)
        return token_logps(self.policy.module, micro.views, micro.distribution, self.policy.device, states)

    def _logps(self, micro: Terms) -> Tensor:
        return token_logps(self.policy.module, micro.views, micro.distribution, self.policy.device)

    def _token_logps(self, terms: Terms, new_N: Tensor) -> Tensor | None:
        """Select the tokens' log-probabilities from `_values`; None if these are divergences."""
        return None if self.teacher is not None else terms.of_tokens(new_N)

    def _reference_logps(self, plan: StepPlan) -> Tensor | None:
        objective = self.config.objective
        is_compared = objective.needs_reference and not objective.precomputes_row_weights and self.teacher is None
        return self._of_reference(plan) if is_compared else None

    def _of_reference(self, plan: StepPlan) -> Tensor:
        self._count_forward(plan, is_reference=True)
        if self.reference is not None:
            return scored_logps(self.reference, plan)
        with self.policy.disable_adapters():
            return scored_logps(self.policy, plan)

    def _count_forward(self, plan: StepPlan, *, is_reference: bool = False) -> None:
        # A reference has no adapter, or has it off.
        lora = FULL_FINE_TUNING if is_reference else self.policy.lora
        self._flops += forward_flops(self.policy.config, lora, plan.canvases).total
