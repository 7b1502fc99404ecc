"""Mixture-of-experts layer: top-k routing of each token, and the weighted sum of its experts.

Rows are sorted by expert, so that each expert computes one product over its rows. No token is ever dropped. The routing
of a token does not depend on the rest of the batch.

Shape letters: N tokens, K experts of a token, T = N * K rows, D width, M inner width of an expert, E experts, G groups,
I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.elementwise import ElementwiseModule
from learner.model.moe.config import MoEConfig


class SparseMLP(nn.Module):
    """Weighted sum of each token's experts, plus the shared SwiGLU if there is one."""

    def __init__(self, width: int, config: MoEConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(width, config)
        self.experts = Experts(width, config)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        x_ND = x.flatten(0, -2)
        weights_NK, experts_NK = self.router(x_ND)
        sorted_T, order_T = experts_NK.flatten().sort(stable=True)
        experts_E = torch.arange(self.router.config.num_experts, device=x.device)
        ends_E = torch.searchsorted(sorted_T, experts_E, right=True, out_int32=True)
        y_TD = self.experts(x_ND[order_T // experts_NK.shape[1]], ends_E)
        y_NKD = y_TD[order_T.argsort()].view(*experts_NK.shape, x_ND.shape[1])
        # One product for each token accumulates in float32, and in a deterministic order.
        y_ND = torch.bmm(weights_NK[:, None].to(y_NKD.dtype), y_NKD)[:, 0]
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND.view(x.shape)


class Router(nn.Module):
    """Router: chooses each token's experts and their weights, in float32 whatever the policy's precision.

    In a lower precision scores would often be equal, and sampler and learner could choose different experts.
    """

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        # Not trained: pre-training adjusts it to balance the experts, and RL keeps it constant.
        bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        self.expert_bias = bias if config.has_bias else None

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [N, K] in float32 and the indices [N, K] of each token's experts."""
        logits_NE = F.linear(x_ND.float(), self.weight.float())
        if self.expert_bias is None:
            scores_NE = logits_NE.softmax(dim=-1)
            experts_NK = scores_NE.topk(self.config.experts_per_token).indices
        else:
            scores_NE = logits_NE.sigmoid()
            # FSDP does not move it, so it may be on another device than the gathered weights.
            experts_NK = self._best_of_groups(scores_NE.detach() + self.expert_bias.to(x_ND.device))
        weights_NK = scores_NE.gather(1, experts_NK)
        if self.config.is_normalised:
            weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_NK * self.config.scale, experts_NK

    def _best_of_groups(self, ranks_NE: Tensor) -> Tensor:
        """Return the indices [N, K] of the best experts of the best groups."""
        config = self.config
        if config.kept_groups < config.num_groups:
            ranks_NGE = ranks_NE.unflatten(1, (config.num_groups, config.experts_of_group))
            kept_NG = ranks_NGE.topk(2).values.sum(dim=-1).topk(config.kept_groups).indices
            is_left_NG = torch.ones(ranks_NGE.shape[:2], dtype=torch.bool, device=ranks_NE.device)
            is_left_NG.scatter_(1, kept_NG, False)
            ranks_NE = ranks_NGE.masked_fill(is_left_NG[:, :, None], -torch.inf).flatten(1)
        return ranks_NE.topk(config.experts_per_token).indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Apply `fn` as every module does, but keep the bias in float32: rounding it to bfloat16 changes the choice."""

        def in_float32(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return tensor.to(made.device) if tensor is self.expert_bias and made.dtype != tensor.dtype else made

        super()._apply(in_float32, recurse)
        return self


class Experts(ElementwiseModule):
    """The SwiGLUs of all experts."""

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = ExpertLinear(config.num_experts, width, 2 * config.expert_width)
        self.down_proj = ExpertLinear(config.num_experts, config.expert_width, width)

    def forward(self, x_TD: Tensor, ends_E: Tensor) -> Tensor:
        """Map rows [T, D], sorted by expert, to [T, D]; `ends_E` (int32) is the exclusive end of each expert's rows."""
        gate_TM, up_TM = self.gate_up_proj(x_TD, ends_E).chunk(2, dim=-1)
        down_TD: Tensor = self.down_proj(self.elementwise.gated(gate_TM, up_TM), ends_E)
        return down_TD


class ExpertLinear(nn.Module):
    """Grouped linear layer: each expert's weight is applied to the expert's rows."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))

    def forward(self, x_TI: Tensor, ends_E: Tensor) -> Tensor:
        """Map [T, I] to [T, O]."""
        if x_TI.is_cuda or torch.compiler.is_compiling():
            # Only the device knows the rows of each expert; reading them would synchronize.
            return F.grouped_mm(x_TI, self.weight.transpose(1, 2), offs=ends_E)
        return _one_by_one(x_TI, self.weight, ends_E)


def _one_by_one(x_TI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute `ExpertLinear.forward` with one product for each expert that has rows."""
    num_rows = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    # One unbind: the gradient is assembled once, with zeros for experts without rows.
    weights = weight_EOI.unbind()
    parts = [F.linear(x, weight) for x, weight in zip(x_TI.split(num_rows), weights, strict=True) if len(x)]
    # FSDP waits for a gradient, so there must be one even without any row.
    return torch.cat(parts) if parts else F.linear(x_TI, weights[0])


def expert_biases(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the experts' biases of a policy, which are kept unsharded and in float32."""
    for module in model.modules():
        if isinstance(module, Router) and module.expert_bias is not None:
            yield module.expert_bias
