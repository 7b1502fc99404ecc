"""The SFT learner on one rank: optimizer steps of masked SFT, and the held-out evaluation loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.batch import to_device_async
from learner.optimizer import PolicyOptimizer
from learner.parallel.sharded_tensors import Rows
from learner.parallel.sharding import ShardedPolicy
from learner.sft.annealing import annealing_mask
from learner.sft.config import SftConfig
from learner.sft.documents import Documents
from learner.sft.masking import MaskedDocuments, mask_documents, masked_logps, plan_sft, sft_rows
from learner.sft.micro_batches import micro_batches

Metrics = dict[str, float]

EVALUATION_T = tuple((2 * index + 1) / 16 for index in range(8))
"""Mask ratios of the evaluation loss: the midpoints of eight equal parts of (0, 1). Their mean approximates the mean
over t; random ratios would make it mostly noise. (d1 gives the i-th of n examples the i-th of n values from 0 to 1.)"""
# Not the run's seed, so that all runs and checkpoints are evaluated under the same masks.
_EVALUATION_SEED = 0


class SftLearner:
    """The learner of stage 1 on one rank."""

    def __init__(self, policy: ShardedPolicy, config: SftConfig, documents: Documents, seed: int) -> None:
        self.policy = policy
        self.config = config
        self._documents = documents.predicted_by(policy.config)
        self._seed = seed
        self.optimizer = PolicyOptimizer(policy, betas=config.betas, weight_decay=config.weight_decay)
        self.num_trained = 0
        """Completion slots trained on so far, over all ranks."""

    def step(self, step: int, lr: float) -> Metrics:
        """Take one optimizer step, on the documents that are selected by `step`.

        Raises FloatingPointError if the loss or the gradient is not finite.
        """
        batch_size = self.config.batch_size
        rows = sft_rows(self._documents.num_rows, batch_size, step, self._seed)
        # Keyed by position in the run, not by document, so that a document is masked differently in each epoch.
        keys = torch.arange(step * batch_size, (step + 1) * batch_size)
        batch = replace(self._documents.select(rows), sample_keys=keys)
        annealing_mask_SS = self._annealing_mask(step, batch.ids.shape[1])
        # The kernel for concatenated rows takes no attention mask.
        concatenates_rows = self.policy.concatenates_rows and annealing_mask_SS is None
        # Masked on the CPU, where sizes are known: the host waits for the device only once, in the optimizer step.
        by_tokens = self.config.packing or concatenates_rows or self.config.micro_batch_tokens is not None
        shard = batch.shard(self.policy.rank, self.policy.world_size, by_tokens=by_tokens)
        masked = plan_sft(shard, self.policy.config.mask_token_id, step, self._seed, batch_size)
        num_units = batch_size if self.config.normalize_by == "row" else batch.num_trained
        parts = _in_micro_batches(
            self.policy,
            masked,
            self.config.micro_batch_tokens,
            packing=self.config.packing,
            concatenates_rows=concatenates_rows,
        )
        losses = []
        for index, micro in enumerate(parts, start=1):
            loss = self._loss(micro, annealing_mask_SS, concatenates_rows=concatenates_rows) / num_units
            self.policy.backward(loss, is_last=index == len(parts))
            losses.append(loss.detach())
        loss = self.policy.sum_over_ranks(torch.stack(losses).sum())
        result = self.optimizer.step(lr, self.config.max_grad_norm, loss)
        self.num_trained += batch.num_trained
        return {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}

    def _annealing_mask(self, step: int, width: int) -> Tensor | None:
        """Return the attention mask of a step's documents of a width; None for the policy's own attention."""
        # Rows of blocks end with a whole block.
        block_length = self.policy.config.block_length or 1
        whole_blocks = -(-width // block_length) * block_length
        return annealing_mask(step, self.config.attention_annealing_steps, whole_blocks, self._seed)

    def _loss(self, micro: MaskedDocuments, annealing_mask_SS: Tensor | None, *, concatenates_rows: bool) -> Tensor:
        """Compute a micro-batch's part of the sum that the loss is the mean of."""
        device = self.policy.device
        logps_N = masked_logps(
            self.policy.module,
            micro,
            packing=self.config.packing,
            concatenates_rows=concatenates_rows,
            annealing_mask_SS=annealing_mask_SS,
            device=device,
        )
        losses_N = -logps_N * to_device_async(micro.weights, device)
        if self.config.normalize_by == "row":
            losses_N = losses_N / to_device_async(micro.sizes[micro.rows], device)
        return losses_N.sum()

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed stage needs besides weights: the live tensors, sharded as the policy."""
        return self.optimizer.state()

    def full_state(self) -> dict[str, Tensor]:
        """Gather the same, whole, on rank 0's CPU; it is empty on the others. A collective."""
        return self.optimizer.full_state()

    def load_full_state(self, state: Mapping[str, Rows]) -> None:
        """Restore the whole state, each rank its rows."""
        self.optimizer.load_full_state(state)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationLoss:
    """The denoising loss on held-out documents."""

    loss: float
    """The mean of `loss_at_t`: nats per completion slot, comparable between policies and runs that are evaluated on the
    same documents."""
    loss_at_t: tuple[float, ...]
    """CE / t per completion slot at each of `EVALUATION_T`."""


def evaluation_loss(
    policy: ShardedPolicy, documents: Documents, batch_size: int, micro_batch_tokens: int | None = None
) -> EvaluationLoss:
    """Compute the loss of SFT at fixed mask ratios and under fixed masks. A collective; all ranks return the same.

    It never packs, so that it is bit-identical with and without `packing`.

    Args:
        policy: the policy to evaluate.
        documents: the documents of all ranks.
        batch_size: documents evaluated at once, over all ranks.
        micro_batch_tokens: maximum tokens of one forward, as in `SftConfig`.
    """
    device, concatenates_rows = policy.device, policy.concatenates_rows
    documents = documents.predicted_by(policy.config)
    by_tokens = concatenates_rows or micro_batch_tokens is not None
    sums = torch.zeros(len(EVALUATION_T), device=device)
    with policy.without_gradients():
        for index, t in enumerate(EVALUATION_T):
            for start in range(0, documents.num_rows, batch_size):
                batch = documents.select(slice(start, start + batch_size))
                some = batch.shard(policy.rank, policy.world_size, by_tokens=by_tokens)
                masked = mask_documents(
                    some, policy.config.mask_token_id, torch.full((some.num_rows,), t), (_EVALUATION_SEED, index)
                )
                for micro in _in_micro_batches(policy, masked, micro_batch_tokens, concatenates_rows=concatenates_rows):
                    logps_N = masked_logps(policy.module, micro, concatenates_rows=concatenates_rows, device=device)
                    sums[index] -= (logps_N * to_device_async(micro.weights, device)).sum()
    losses = (policy.sum_over_ranks(sums) / documents.num_trained).tolist()
    return EvaluationLoss(loss=sum(losses) / len(losses), loss_at_t=tuple(losses))


def _in_micro_batches(
    policy: ShardedPolicy,
    masked: MaskedDocuments,
    max_tokens: int | None,
    *,
    concatenates_rows: bool,
    packing: bool = False,
) -> list[MaskedDocuments]:
    """Cut this rank's documents into micro-batches, as many as any rank has; one without a limit. A collective."""
    if max_tokens is None:
        return [masked]
    block_length = policy.config.block_length
    parts = micro_batches(masked, max_tokens, block_length, packing=packing, concatenates_rows=concatenates_rows)
    count = int(policy.max_over_ranks(torch.tensor(len(parts))))
    return parts + [masked.weightless()] * (count - len(parts))
