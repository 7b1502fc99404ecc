"""The value model: a second network that predicts the return of the sampler's states.

It has the policy's backbone, of the start of the stage, and a linear head that begins at zero (TraceRL, arXiv
2509.06949, and dLLM-RL's `init_*_value_model.py`). It is sharded as the policy is, and has its own AdamW.
Under LoRA an adapter and the head are trained.

Shape letters: B rows of a rank, L completion slots, N terms, U units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.estimators import Terms
from learner.estimators.views import token_values
from learner.model.config import TransformerConfig
from learner.model.lora import adapted_layers, is_adapter
from learner.model.transformer import Transformer
from learner.objectives.units import units_of
from learner.objectives.value import value_shape
from learner.optimizer import PolicyOptimizer, StepResult
from learner.parallel.sharded_tensors import Rows, local_part
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round, StepPlan, scored_logps
from learner.value.advantages import outcome_rewards, step_targets

_HEAD = "head.weight"
_LR_FACTOR = 5.0
"""Its default learning rate over the policy's, as in dLLM-RL's configurations."""


class ValueTransformer(Transformer):
    """A transformer with one output: a slot's value."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.d_model, 1, bias=False)

    def _logits(self, x_ND: Tensor) -> Tensor:
        assert self.head is not None
        # Under LoRA the head is in float32, whatever the frozen backbone is held in.
        values_N1: Tensor = self.head(x_ND.to(self.head.weight.dtype))
        return values_N1


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTargets:
    """What the value model is trained towards in a round."""

    old: Tensor
    """[B, L] float32: its predictions at the start of the round."""
    returns: Tensor
    """[B, L] float32."""


class ValueModel:
    """The value model on one rank."""

    def __init__(self, policy: ShardedPolicy, config: LearnerConfig) -> None:
        """Make it from the current policy, without the adapter that the stage trains."""
        assert config.value is not None, "there is a value model where a recipe asks for one"
        assert policy.lora.base_weights != "nf4", "a recipe with 4-bit weights and a value model is refused"
        self.network = _network(policy)
        self.shape = value_shape(policy.config)
        """Its shape, as FLOP are counted."""
        self.optimizer = PolicyOptimizer(self.network, betas=config.betas, weight_decay=config.weight_decay)
        self._config, self._learner = config.value, config

    def set_targets(self, minibatches: list[Round]) -> tuple[list[ValueTargets], dict[str, float]]:
        """Give each minibatch its step-level advantages. A collective.

        Returns:
            what the value model is trained towards in each minibatch, and metrics of its predictions.
        """
        targets, sums_4 = [], torch.zeros(4, dtype=torch.float64)
        for some in minibatches:
            found, of_one_4 = self._targets(some)
            targets.append(found)
            sums_4 += of_one_4
        num_tokens, returns, squares, errors = self.network.sum_over_ranks(sums_4).tolist()
        variance = squares / max(1.0, num_tokens) - (returns / max(1.0, num_tokens)) ** 2
        error = errors / max(1.0, num_tokens)
        return targets, {"value/error": error, "value/explained_variance": 1 - error / max(variance, 1e-12)}

    def step(self, plan: StepPlan, targets: ValueTargets, round_index: int) -> StepResult:
        """Take an optimizer step on the clipped squared error of a plan's terms. A collective.

        Raises FloatingPointError if the loss or the gradient is not finite.
        """
        total = torch.zeros((), device=self.network.device)
        for micro, counts, is_last in zip(plan.micro_batches, plan.counts, plan.ends, strict=True):
            loss = self._loss(micro, targets)
            self.network.backward(loss, is_last=is_last)
            total += loss.detach() * float(counts)
        lr = (self._config.lr or _LR_FACTOR * self._learner.lr) * self._learner.lr_at(round_index) / self._learner.lr
        return self.optimizer.step(lr, self._learner.max_grad_norm, self.network.sum_over_ranks(total[None])[0])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that this rank keeps between updates."""
        yield from self.network.tensors()
        yield from self.optimizer.tensors()

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs: trained parameters and the optimizer. They are the live tensors, sharded."""
        weights = {f"weights/{name}": one.detach() for name, one in self.network.trained_parameters.items()}
        return weights | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state().items()}

    def load_full_state(self, state: Mapping[str, Rows]) -> None:
        """Restore the whole state, each rank its rows."""
        parts: dict[str, dict[str, Rows]] = {"weights": {}, "optimizer": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.network.load_trained(parts["weights"])
        self.optimizer.load_full_state(parts["optimizer"])

    def _targets(self, some: Round) -> tuple[ValueTargets, Tensor]:
        """Compute a minibatch's targets, and sums over its tokens: 1, return, its square, and the squared error."""
        plan, device = some.plan(0), self.network.device
        terms, shape = plan.terms, some.batch.step_map.shape
        counted_N = terms.importance > 0
        rows_N, slots_N = terms.rows[counted_N], terms.slots[counted_N]
        values_N = scored_logps(self.network, plan, self._values)[counted_N]

        def placed(values_N: Tensor, rest: float) -> Tensor:
            return torch.full(shape, rest, dtype=values_N.dtype, device=device).index_put((rows_N, slots_N), values_N)

        steps_BL, old_BL = placed(terms.parts[counted_N], -1), placed(values_N, 0.0)
        rewards_BL = outcome_rewards(some.rows.advantages, steps_BL)
        if some.batch.process_rewards is not None:
            rewards_BL = rewards_BL + some.batch.process_rewards
        found = step_targets(old_BL, rewards_BL, steps_BL, gamma=self._config.gamma, lam=self._config.lam)
        some.rows = replace(some.rows, slot_advantages=found.advantages)
        return_N = found.returns[rows_N, slots_N].double()
        errors_N = return_N - values_N.double()
        sums = [torch.ones_like(return_N), return_N, return_N.square(), errors_N.square()]
        return ValueTargets(old=old_BL, returns=found.returns), torch.stack([one.sum() for one in sums]).cpu()

    def _values(self, micro: Terms) -> Tensor:
        return token_values(self.network.module, micro.views, self.network.device).float()

    def _loss(self, micro: Terms, targets: ValueTargets) -> Tensor:
        """Compute PPO's clipped value loss of some terms, with the weights of the policy's loss."""
        values_N = self._values(micro)
        old_N, return_N = targets.old[micro.rows, micro.slots], targets.returns[micro.rows, micro.slots]
        loss_N = clipped_value_loss(values_N, old_N, return_N, clip=self._config.clip)
        units = units_of(micro, self._learner.objective.level)
        counts_U = units.sum(torch.ones_like(loss_N))
        return (units.sum(loss_N) / counts_U * units.importance).sum()


def clipped_value_loss(values_N: Tensor, old_N: Tensor, return_N: Tensor, *, clip: float) -> Tensor:
    """Compute PPO's value loss [N]: half the squared error, of the clipped prediction where that is greater.

    A prediction is clipped to within `clip` of `old_N`.
    """
    clipped_N = old_N + (values_N - old_N).clamp(-clip, clip)
    return 0.5 * (values_N - return_N).square().maximum((clipped_N - return_N).square())


def _network(policy: ShardedPolicy) -> ShardedPolicy:
    """Make a network with a copy of the policy's backbone and a head of zeros, sharded as the policy."""
    with torch.device("meta"):
        model = ValueTransformer(policy.config).to(policy.dtypes["embed.weight"])
    assert model.head is not None
    # Trained parameters are in float32.
    model.head.float()
    network = policy.sharded_like(model)
    # LoRA froze it.
    model.head.weight.requires_grad_(True)
    theirs = policy.weights
    for name, weight in network.weights.items():
        if name == _HEAD:
            local_part(weight).zero_()
        elif not is_adapter(name):
            local_part(weight).copy_(local_part(theirs[name]))
    for mine, others in zip(
        adapted_layers(network.module).values(), adapted_layers(policy.module).values(), strict=True
    ):
        mine.start_A, mine.start_B, mine.start_scaling = others.start_A, others.start_B, others.start_scaling
    return network
