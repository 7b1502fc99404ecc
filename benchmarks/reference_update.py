"""Reference implementation of the first d1's update (diffu-GRPO), the learner benchmark's baseline.

It runs one round as the published trainer does (arXiv 2504.12216, section 3.2, and its code):
1. Compute log-probabilities of the old policy and of a frozen reference under every prompt mask of the round.
2. In each inner update, run forward and backward with one micro-batch per group, then step the optimizer.

Every forward runs whole canvases and computes the logits of every slot, prompt included. A group's loss is the mean
over its tokens. Two differences: the GPU's cache is not emptied after each forward, and all parameters are trained
instead of LoRA with dropout, to match our learner.

Shape letters: U inner updates, B rows, P prompt, L completion slots, S = P + L, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.reference import ReferenceNet
from learner.batch import RolloutBatch
from learner.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSettings:
    """Hyperparameters of an update. The defaults are d1's."""

    kl_coef: float = 0.04
    clip: float = 0.5
    lr: float = 3e-6
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    max_grad_norm: float = 0.2
    is_stacked: bool = False
    """Whether one forward of U * G rows computes a group's frozen log-probabilities for all masks, as in the original.
    Otherwise there is one forward per mask, which needs less memory."""


class ReferenceUpdate:
    """d1's trainer in one process: a policy, its frozen reference and AdamW."""

    def __init__(self, model: Transformer, settings: UpdateSettings | None = None) -> None:
        self.settings = settings or UpdateSettings()
        self.model, self.net = model, ReferenceNet(model)
        self.reference_net = ReferenceNet(copy.deepcopy(model).requires_grad_(False))
        # As transformers' trainer does: no weight decay for norms and biases.
        groups: list[dict[str, Any]] = [
            {"params": [one for one in model.parameters() if one.ndim > 1]},
            {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )

    def update(self, batch: RolloutBatch, prompt_masked_UBP: Tensor) -> None:
        """Train on one round whose prompts have equal length.

        Args:
            batch: the round.
            prompt_masked_UBP: [U, B, P] bool, the prompt tokens that each inner update masks.
        """
        device = next(self.model.parameters()).device
        batch, prompt_masked_UBP = batch.to(device), prompt_masked_UBP.to(device)
        groups = [(batch.group_ids == group).nonzero()[:, 0] for group in batch.group_ids.unique()]
        buffers = [self._buffered(batch.select(rows), prompt_masked_UBP[:, rows]) for rows in groups]
        for index in range(len(prompt_masked_UBP)):
            for buffer in buffers:
                (self._loss(buffer, index) / len(groups)).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _buffered(self, group: RolloutBatch, masked_UBP: Tensor) -> _Buffer:
        return _Buffer(
            group=group,
            masked=masked_UBP,
            advantages=group.rewards - group.rewards.mean(),
            old=self._frozen_logps(self.net, group, masked_UBP),
            reference=self._frozen_logps(self.reference_net, group, masked_UBP),
        )

    @torch.no_grad()
    def _frozen_logps(self, net: ReferenceNet, group: RolloutBatch, masked_UBP: Tensor) -> Tensor:
        parts = [masked_UBP] if self.settings.is_stacked else masked_UBP.split(1)
        return torch.cat([_token_logps(net, group, part) for part in parts])

    def _loss(self, buffer: _Buffer, index: int) -> Tensor:
        new_BL = _token_logps(self.net, buffer.group, buffer.masked[index : index + 1])[0]
        ratio_BL = (new_BL - buffer.old[index]).exp()
        clipped_BL = ratio_BL.clamp(1 - self.settings.clip, 1 + self.settings.clip)
        advantages_B1 = buffer.advantages[:, None]
        gain_BL = torch.min(ratio_BL * advantages_B1, clipped_BL * advantages_B1)
        difference_BL = buffer.reference[index] - new_BL
        kl_BL = difference_BL.exp() - difference_BL - 1
        mask_BL = buffer.group.completion_mask()
        return ((self.settings.kl_coef * kl_BL - gain_BL) * mask_BL).sum() / mask_BL.sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Buffer:
    """Data of one group, reused by the inner updates of a round."""

    group: RolloutBatch
    masked: Tensor
    """[U, B, P] bool."""
    advantages: Tensor
    """[B] float32, rewards minus their mean."""
    old: Tensor
    """[U, B, L] float32, nats. Likewise `reference`."""
    reference: Tensor


def _token_logps(net: ReferenceNet, group: RolloutBatch, masked_UBP: Tensor) -> Tensor:
    """Compute log-probabilities [U, B, L] float32 of all completion slots, those after the text too, in one forward."""
    U, B, _ = masked_UBP.shape
    mask_id = net.config.mask_token_id
    prompt_UBP = torch.where(masked_UBP, mask_id, group.prompt_ids)
    completion_UBL = torch.full((U, *group.completion_ids.shape), mask_id, device=prompt_UBP.device)
    logits_RSV = net(torch.cat((prompt_UBP, completion_UBL), dim=2).flatten(0, 1))
    logits_RLV = logits_RSV[:, -group.num_slots :]
    targets_N = group.completion_ids.expand(U, B, -1).flatten()
    losses_N = F.cross_entropy(logits_RLV.flatten(0, 1).float(), targets_N, reduction="none")
    return -losses_N.view(U, B, group.num_slots)
