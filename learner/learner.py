"""The learner: improves a policy by policy gradients on graded completions.

An ordinary class, whole on one process or one rank of many. Every rank is given the same batch, works on its share of
the rows and leaves with the same metrics. It knows estimators, objectives and advantages by their interfaces only.
Micro-batches stream; the gradient is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, Terms, token_logps
from learner.flops import forward_flops, update_flops
from learner.imitation import DENOISING_LOSS, demonstrations
from learner.model.lora_config import WHOLE
from learner.objectives import DistillationConfig, Loss
from learner.optimizer import PolicyOptimizer
from learner.parallel.micro_batches import coefficients
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.teacher import Teacher
from learner.probes import mask_variance, sampling_gap
from learner.round import WEIGHING, Plan, Round, joined, scored_logps
from learner.update_metrics import UpdateMetrics, batch_metrics

Metrics = dict[str, float]


@dataclass(slots=True)
class Known:
    """Log-probabilities [N] of a plan's terms that stay what they are for the round."""

    old: Tensor | None = None
    reference: Tensor | None = None


class Learner:
    """Stage 2 on one rank.

    The reference is a frozen copy of the policy. Under LoRA it is the policy without its adapter, and needs none.
    """

    def __init__(
        self,
        policy: ShardedPolicy,
        config: LearnerConfig,
        sampler: SamplerFacts | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Train `policy` on completions that are sampled as `sampler` says.

        `teacher` is what an objective that needs one compares with; None: the policy as it stands now, read causally.
        Raises ValueError when the algorithm cannot learn from such completions.
        """
        self.policy = policy
        self.config = config
        self._sampler = sampler or SamplerFacts()
        refusal = config.refusal(self._sampler)
        if refusal is not None:
            raise ValueError(f"learner.{refusal}")
        self.optimizer = PolicyOptimizer(policy, betas=config.betas, weight_decay=config.weight_decay)
        self.model_flops = 0.0
        """FLOP of the newest update on all ranks: of the model (`learner/flops.py`), probes not included."""
        self._flops = 0.0
        self.reference: ShardedPolicy | None = None
        if config.objective.needs_reference and not policy.lora.rank:
            self.reference = policy.frozen_copy()
        self.teacher: Teacher | None = None
        if isinstance(config.objective, DistillationConfig):
            self.teacher = teacher or Teacher.of_policy(policy, config.objective)

    def update(self, batch: RolloutBatch, round_index: int) -> Metrics:
        """Train on one round: `inner_updates` sweeps through it, of `num_minibatches` optimizer steps each.

        Old likelihoods are those of the policy at the start of the round, under the same masks as the new ones.
        A round of which the filters leave nothing changes nothing; its metrics say so.
        Raises FloatingPointError when the loss or the gradient is not finite. That step is not taken; the policy can
        train on.
        """
        lr = self.config.lr_at(round_index)
        metrics = UpdateMetrics(self.policy)
        work = Round(self.policy, self.config, self._sampler, batch)
        probed = sampling_gap(self.policy, self.config, self._sampler, batch)
        self._flops = 0.0
        if work.num_rows:
            probed |= mask_variance(self.policy, self.config, self._sampler, batch)
            minibatches = work.minibatches()
            if self.config.objective.weighs_rows:
                self._weigh_rows(minibatches)
            known = self._known_before(minibatches)
            correct: list[Round] = []
            if self.config.imitation_coef and bool(batch.correct.any()):
                correct = demonstrations(self.policy, self.config, self._sampler, batch).minibatches()
            for index in range(self.config.inner_updates):
                for place, some in enumerate(minibatches):
                    plan = some.plan(index)
                    self._backward(some, plan, known[place].setdefault(plan.key, Known()), metrics)
                    # There may be fewer correct completions than steps.
                    for correct_ones in correct[place : place + 1]:
                        self._imitate(correct_ones, index, metrics)
                    metrics.add_step(self._step(metrics, lr))
        self.model_flops = self.policy.sum_over_ranks(torch.tensor([self._flops], dtype=torch.float64)).item()
        return (
            batch_metrics(batch)
            | probed
            | metrics.means()
            | {"learning_rate": lr, "num_trained_completions": float(work.num_rows)}
        )

    def sync_reference(self, round_index: int) -> None:
        """Let the KL reference be the current policy if the recipe says so of this round, trained on or not."""
        every = self.config.reference_sync_rounds
        if self.reference is not None and every and (round_index + 1) % every == 0:
            self.reference.take(self.policy)

    def tensors(self) -> Iterator[Tensor]:
        """All that this rank holds between two updates, beside the policy."""
        yield from self.optimizer.tensors()
        if self.reference is not None:
            yield from self.reference.tensors()
        if self.teacher is not None:
            yield from self.teacher.model.tensors()

    def full_state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides the weights: the optimizer, and a reference that has moved.

        A collective; whole on rank 0, empty on the others.
        """
        state = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.full_state().items()}
        if self.reference is not None and self.config.reference_sync_rounds:
            state |= {f"reference/{name}": tensor for name, tensor in self.reference.weights_on_rank_0().items()}
        return state

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `full_state` gave."""
        parts: dict[str, dict[str, Tensor]] = {"optimizer": {}, "reference": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.optimizer.load_full_state(parts["optimizer"])
        if self.reference is not None and parts["reference"]:
            self.reference.load_full_weights(parts["reference"])

    def _weigh_rows(self, minibatches: list[Round]) -> None:
        for some in minibatches:
            plan = some.plan(WEIGHING)
            self._count_forward(plan)
            some.weigh_rows(self._of_reference(plan) - scored_logps(self.policy, plan))

    def _known_before(self, minibatches: list[Round]) -> list[dict[int, Known]]:
        """For each minibatch, by mask key, old likelihoods of the canvases that only later steps run, and with them the
        reference's.

        At the first step the policy is still the old one: what it gives is the old likelihood, for free.
        """
        known: list[dict[int, Known]] = [{} for _ in minibatches]
        if self.config.objective.needs_old:
            first = minibatches[0].plan(0).key
            for place, some in enumerate(minibatches):
                for index in range(self.config.inner_updates):
                    plan = some.plan(index)
                    if plan.key in known[place] or (place == 0 and plan.key == first):
                        continue
                    self._count_forward(plan)
                    old_N = scored_logps(self.policy, plan)
                    known[place][plan.key] = Known(old=old_N, reference=self._reference_logps(plan))
        return known

    def _backward(self, work: Round, plan: Plan, known: Known, metrics: UpdateMetrics) -> None:
        """Add the gradient of one step, and what its plan gave for the next."""
        if known.reference is None:
            known.reference = self._reference_logps(plan)
        self._flops += update_flops(self.policy.config, self.policy.lora, plan.canvases)
        if self.teacher is not None:
            self._flops += self.teacher.flops(plan.terms, work.on_host) * any(plan.counts)
        if plan.is_split:
            self._in_two_sweeps(work, plan, known, metrics)
        else:
            self._in_one_sweep(work, plan, known, metrics)

    def _imitate(self, correct: Round, index: int, metrics: UpdateMetrics) -> None:
        """Add the gradient of the denoising loss of the correct completions."""
        plan = correct.plan(index)
        self._flops += update_flops(self.policy.config, self.policy.lora, plan.canvases)
        for micro, counts in zip(plan.micro_batches, plan.counts, strict=True):
            new_N = self._logps(micro)
            logps = correct.logps(micro, new_N, new_N.detach(), None)
            loss = DENOISING_LOSS.loss(micro, logps, correct.rows).total
            self._accumulate(self.config.imitation_coef * loss)
            metrics.add_imitation(loss, self.config.imitation_coef, counts=counts)
        metrics.end_imitation()

    def _in_one_sweep(self, work: Round, plan: Plan, known: Known, metrics: UpdateMetrics) -> None:
        news = []
        for micro, inside, counts in zip(plan.micro_batches, plan.inside, plan.counts, strict=True):
            new_N = self._values(work, micro)
            news.append(new_N.detach())
            loss = self._loss(work, micro, new_N, known, inside)
            self._accumulate(loss.total)
            metrics.add(loss, self._token_logps(micro, new_N), counts=counts)
        if known.old is None:
            known.old = joined(news, plan)

    def _in_two_sweeps(self, work: Round, plan: Plan, known: Known, metrics: UpdateMetrics) -> None:
        """The first finds the derivative of the loss by each log-probability, the second goes down it."""
        all_N = scored_logps(self.policy, plan, partial(self._values, work))
        if known.old is None:
            known.old = all_N
        whole = slice(0, plan.terms.num_terms)
        gradient_N = coefficients(lambda new_N: self._loss(work, plan.terms, new_N, known, whole).total, all_N)
        loss = self._loss(work, plan.terms, all_N, known, whole)
        metrics.add(loss, self._token_logps(plan.terms, all_N), counts=any(plan.counts))
        for micro, inside in zip(plan.micro_batches, plan.inside, strict=True):
            new_N = self._values(work, micro)
            weight_N = gradient_N[inside] if inside.stop > inside.start else torch.zeros_like(new_N)
            self._accumulate((new_N * weight_N).sum())

    def _step(self, metrics: UpdateMetrics, lr: float) -> float:
        """Step down the gradient that was added up; its norm."""
        try:
            return self.optimizer.step(lr, self.config.max_grad_norm, metrics.take_loss()).grad_norm
        except FloatingPointError:
            self.optimizer.forget_gradients()
            raise

    def _loss(self, work: Round, terms: Terms, new_N: Tensor, known: Known, inside: slice) -> Loss:
        is_idle = inside.stop == inside.start
        old_N = new_N.detach() if known.old is None or is_idle else known.old[inside]
        reference_N = known.reference
        if reference_N is not None:
            reference_N = new_N.detach() if is_idle else reference_N[inside]
        return self.config.objective.loss(terms, work.logps(terms, new_N, old_N, reference_N), work.rows)

    def _values(self, work: Round, micro: Terms) -> Tensor:
        """[N] what the objective is a function of: log-probabilities, or divergences from the teacher."""
        if self.teacher is None:
            return self._logps(micro)
        compared = self.teacher.compared(micro, work.on_host)
        return token_logps(self.policy.module, micro.views, micro.law, self.policy.device, compared)

    def _logps(self, micro: Terms) -> Tensor:
        return token_logps(self.policy.module, micro.views, micro.law, self.policy.device)

    def _token_logps(self, terms: Terms, new_N: Tensor) -> Tensor | None:
        """The log-probabilities of tokens among what `_values` gave."""
        return None if self.teacher is not None else terms.of_tokens(new_N)

    def _accumulate(self, loss: Tensor) -> None:
        # FSDP averages over ranks; the objective is a sum over them.
        (loss * self.policy.world_size).backward()

    def _reference_logps(self, plan: Plan) -> Tensor | None:
        objective = self.config.objective
        return self._of_reference(plan) if objective.needs_reference and not objective.weighs_rows else None

    def _of_reference(self, plan: Plan) -> Tensor:
        self._count_forward(plan, is_reference=True)
        if self.reference is not None:
            return scored_logps(self.reference, plan)
        with self.policy.adapters_off():
            return scored_logps(self.policy, plan)

    def _count_forward(self, plan: Plan, *, is_reference: bool = False) -> None:
        # A reference has no adapter, or has it off.
        lora = WHOLE if is_reference else self.policy.lora
        self._flops += forward_flops(self.policy.config, lora, plan.canvases).total
