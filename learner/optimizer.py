"""AdamW over a sharded policy, with a state that can be resumed on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.parallel.offload import host_copy
from learner.parallel.progress import PROGRESS
from learner.parallel.sharded_tensors import Rows, gather_on_rank_0, local_part, shard_like
from learner.parallel.sharding import ShardedPolicy

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class StepResult(NamedTuple):
    """Loss and gradient norm of an optimizer step."""

    loss: float
    """Over all ranks."""
    grad_norm: float
    """Before clipping."""


class PolicyOptimizer:
    """AdamW with gradient clipping; learning rate and clipping norm are given at each step.

    Weight decay is for matrices, embeddings among them, and not for norms and biases, as in the trainers of
    transformers and TRL.
    """

    def __init__(self, policy: ShardedPolicy, *, betas: tuple[float, float], weight_decay: float) -> None:
        self._policy = policy
        self._parameters = policy.trained_parameters
        # On a GPU, fusing runs one kernel for all parameters; on CPUs it would only change the rounding.
        self._is_fused = next(iter(self._parameters.values())).device.type == "cuda"
        parameters = self._parameters.values()
        groups = [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": weight_decay},
            {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, fused=self._is_fused
        )

    def step(self, lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        """Clip the accumulated gradients to a global norm, step, and clear them.

        A gradient of zero (equal rewards, or no scored token) teaches nothing. No step is taken then, because momentum
        and weight decay alone would move the policy.

        The host synchronises with the device once, for loss and norm together.

        Args:
            lr: learning rate of this step.
            max_grad_norm: gradients of a larger global norm are scaled down to it.
            loss: [] of this step, over all ranks.

        Raises:
            FloatingPointError: the loss or the gradient is not finite. The parameters are left as they were, and the
                gradients are cleared.
        """
        with PROGRESS.in_collective("the all-reduce of the gradient norm"):
            norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_grad_norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            found = StepResult(*torch.stack((loss.detach().to(norm.device).double(), norm.double())).tolist())
        if (problem := _not_finite(found)) is not None:
            self._adamw.zero_grad()
            raise FloatingPointError(problem)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        if found.grad_norm > 0:
            self._adamw.step()
        self._adamw.zero_grad()
        return found

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Undo all steps of the block if it raises FloatingPointError, bit-identically.

        The parameters and the state of this rank are copied to host memory first: 12 bytes per trained parameter in
        float32.
        """
        has_stepped = bool(self._adamw.state)
        held = [local_part(tensor.detach()) for tensor in chain(self._parameters.values(), self.tensors())]
        # The steps follow the copies on the same stream, and an error follows a synchronization.
        copies = [host_copy(local, non_blocking=True) for local in held]
        try:
            yield
        except FloatingPointError:
            for local, copy in zip(held, copies, strict=True):
                local.copy_(copy)
            if not has_stepped:
                self._adamw.state.clear()
            raise

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's optimizer state."""
        return (value for state in self._adamw.state.values() for value in state.values())

    def state(self) -> dict[str, Tensor]:
        """Return the moments, sharded as the parameters, and the step counts, by parameter name: the live tensors."""
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def full_state(self) -> dict[str, Tensor]:
        """Gather the same, whole, on rank 0's CPU. A collective."""
        return gather_on_rank_0(self._policy.rank, self.state())

    def load_full_state(self, state: Mapping[str, Rows]) -> None:
        """Restore the whole state, each rank its rows; it is empty for an optimizer that has not stepped."""
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}/{_STEP}" not in state:
                continue
            moments = {key: shard_like(state[f"{name}/{key}"], parameter) for key in _MOMENTS}
            # The fused kernel counts steps on the GPU, the others on the CPU.
            step = state[f"{name}/{_STEP}"]
            assert isinstance(step, Tensor), "a scalar has no rows"
            step = step.to(parameter.device if self._is_fused else "cpu", copy=True)
            self._adamw.state[parameter] = {_STEP: step, **moments}


def _not_finite(found: StepResult) -> str | None:
    """Return which number of a step is not finite, and what helps; None if both are."""
    if not math.isfinite(found.loss):
        return (
            f"the loss is {found.loss}: no step is taken, which would harm the policy; try a lower lr or a smaller clip"
        )
    if not math.isfinite(found.grad_norm):
        return (
            f"the gradient's norm is {found.grad_norm}: no step is taken, which would harm the policy; try a lower lr"
        )
    return None
