"""AdamW over a sharded policy, with a state that can be written whole and resumed on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.sharding import ShardedPolicy, gather_on_rank_0, shard_like

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class PolicyOptimizer:
    """One optimizer step at a time, with the learning rate and the clipping norm given for each."""

    def __init__(self, policy: ShardedPolicy, *, betas: tuple[float, float], weight_decay: float) -> None:
        self._policy = policy
        self._adamw = torch.optim.AdamW(policy.module.parameters(), lr=0.0, betas=betas, weight_decay=weight_decay)

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Clip the accumulated gradients to a global norm, step, and clear them. Returns the norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; the parameters are left as they were.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._policy.module.parameters(), max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm.item()}: training stops before it harms the policy; try a lower lr"
            )
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad()
        return norm.item()

    def full_state(self) -> dict[str, Tensor]:
        """The moments and step counts by parameter name, whole, on rank 0's CPU. A collective."""
        state = {
            f"{name}/{key}": value
            for name, parameter in self._policy.module.named_parameters()
            for key, value in self._adamw.state.get(parameter, {}).items()
        }
        return gather_on_rank_0(self._policy.rank, state)

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `full_state` gave; an empty state is that of an optimizer that has not stepped."""
        for name, parameter in self._policy.module.named_parameters():
            if f"{name}/{_STEP}" not in state:
                continue
            moments = {key: shard_like(state[f"{name}/{key}"], parameter) for key in _MOMENTS}
            self._adamw.state[parameter] = {_STEP: state[f"{name}/{_STEP}"].clone(), **moments}
