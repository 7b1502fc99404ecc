"""A feed-forward sublayer of experts: a router sends each token to a few of them, and adds up what they give.

Rows are sorted by expert, so that each expert computes one product over the rows that are its own, and no row is ever
dropped. Routing is of each token by itself: what else is in the batch changes nothing.

Shape letters: N tokens, K experts of a token, T = N * K rows, D width, M inner width of an expert, E experts, G groups,
I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.moe.config import MoEConfig


class SparseMLP(nn.Module):
    """Each token's experts, weighed, and the shared SwiGLU if there is one."""

    def __init__(self, width: int, config: MoEConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(width, config)
        self.experts = Experts(width, config)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to the same."""
        x_ND = x.flatten(0, -2)
        weights_NK, experts_NK = self.router(x_ND)
        sorted_T, order_T = experts_NK.flatten().sort(stable=True)
        experts_E = torch.arange(self.router.config.num_experts, device=x.device)
        ends_E = torch.searchsorted(sorted_T, experts_E, right=True, out_int32=True)
        y_TD = self.experts(x_ND[order_T // experts_NK.shape[1]], ends_E)
        y_NKD = y_TD[order_T.argsort()].view(*experts_NK.shape, x_ND.shape[1])
        # One product for each token: it adds up in float32, and in the same order every time.
        y_ND = torch.bmm(weights_NK[:, None].to(y_NKD.dtype), y_NKD)[:, 0]
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND.view(x.shape)


class Router(nn.Module):
    """Which experts a token takes, and with what weights: in float32, whatever the policy is in.

    In less, a token's scores would often be equal, and its experts others than the sampler's or the learner's.
    """

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        # No gradient moves it, and no optimizer. Pre-training balances its experts by it, and RL leaves it.
        bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        self.expert_bias = bias if config.has_bias else None

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """[N, K] weights in float32, and which experts."""
        logits_NE = F.linear(x_ND.float(), self.weight.float())
        if self.expert_bias is None:
            scores_NE = logits_NE.softmax(dim=-1)
            experts_NK = scores_NE.topk(self.config.experts_per_token).indices
        else:
            scores_NE = logits_NE.sigmoid()
            # FSDP leaves it where it is, which need not be where the weights are gathered.
            experts_NK = self._best_of_groups(scores_NE.detach() + self.expert_bias.to(x_ND.device))
        weights_NK = scores_NE.gather(1, experts_NK)
        if self.config.is_normalised:
            weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_NK * self.config.scale, experts_NK

    def _best_of_groups(self, ranks_NE: Tensor) -> Tensor:
        """[N, K] the best experts of the best groups."""
        config = self.config
        if config.kept_groups < config.num_groups:
            ranks_NGE = ranks_NE.unflatten(1, (config.num_groups, config.experts_of_group))
            kept_NG = ranks_NGE.topk(2).values.sum(dim=-1).topk(config.kept_groups).indices
            is_left_NG = torch.ones(ranks_NGE.shape[:2], dtype=torch.bool, device=ranks_NE.device)
            is_left_NG.scatter_(1, kept_NG, False)
            ranks_NE = ranks_NGE.masked_fill(is_left_NG[:, :, None], -torch.inf).flatten(1)
        return ranks_NE.topk(config.experts_per_token).indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """As of every module, but that the bias stays in float32: differences of it that bfloat16 has not do count."""

        def in_float32(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return tensor.to(made.device) if tensor is self.expert_bias and made.dtype != tensor.dtype else made

        super()._apply(in_float32, recurse)
        return self


class Experts(nn.Module):
    """The SwiGLUs of all experts."""

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = ExpertLinear(config.num_experts, width, 2 * config.expert_width)
        self.down_proj = ExpertLinear(config.num_experts, config.expert_width, width)

    def forward(self, x_TD: Tensor, ends_E: Tensor) -> Tensor:
        """[T, D] of rows that are sorted by expert, of which each expert's end before `ends_E` (int32), to the same."""
        gate_TM, up_TM = self.gate_up_proj(x_TD, ends_E).chunk(2, dim=-1)
        down_TD: Tensor = self.down_proj(F.silu(gate_TM) * up_TM, ends_E)
        return down_TD


class ExpertLinear(nn.Module):
    """One linear layer of all experts: each runs on its own rows."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))

    def forward(self, x_TI: Tensor, ends_E: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        if x_TI.is_cuda or torch.compiler.is_compiling():
            # How many rows an expert has only the device knows.
            return F.grouped_mm(x_TI, self.weight.transpose(1, 2), offs=ends_E)
        return _one_by_one(x_TI, self.weight, ends_E)


def _one_by_one(x_TI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The same by a product for each expert that has rows."""
    num_rows = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    # Taken apart once: the gradient is then put together once, zeros where an expert has no rows.
    weights = weight_EOI.unbind()
    parts = [F.linear(x, weight) for x, weight in zip(x_TI.split(num_rows), weights, strict=True) if len(x)]
    # Without any row there is a gradient all the same: FSDP waits for it.
    return torch.cat(parts) if parts else F.linear(x_TI, weights[0])


def expert_biases(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a policy that are held as they are, whole and in float32."""
    for module in model.modules():
        if isinstance(module, Router) and module.expert_bias is not None:
            yield module.expert_bias
