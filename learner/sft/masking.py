"""Masked supervised fine-tuning: the denoising loss of LLaDA on completions.

Each document samples a mask ratio t ~ U(0, 1], and masks its completion slots with probability t, never its prompt. The
loss is CE / t on the masked slots: an upper bound on the negative log-likelihood (LLaDA, arXiv 2502.09992, algorithm
2). The ratios of a batch are spread evenly over (0, 1], from a random start at each step: each is uniform, and their
mean hardly varies.

A document's loss is divided by the number of its completion slots, and averaged over the documents of the whole batch,
on all ranks: long answers weigh no more than short ones (LLaDA's guidelines; d1 does so too). `normalize_by: slot`
divides by the slots of the whole batch instead, so that every slot weighs the same.

Shape letters: B documents, S slots of the widest one, N masked slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from learner.batch import to_device_async
from learner.counter import uniform
from learner.estimators.block_views import views_of
from learner.estimators.views import SOFTMAX, token_logps
from learner.model.deferred import torch
from learner.model.targets import Targets, query_grid
from learner.seeds import fold
from learner.sft.documents import Documents
from learner.sft.packing import pack

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.transformer import Transformer

_MIN_T = 1e-3
_T_KEY, _SLOT_KEY, _ORDER_KEY = 1, 2, 3


def sft_rows(num_labels: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Return the rows [batch_size] of an optimizer step; each epoch is a separate permutation of the examples."""
    positions = torch.arange(step * batch_size, (step + 1) * batch_size)
    rows = torch.empty_like(positions)
    for epoch in (positions // num_labels).unique().tolist():
        order = uniform(torch.tensor(fold(seed, _ORDER_KEY, epoch)), torch.arange(num_labels)).argsort()
        inside = positions // num_labels == epoch
        rows[inside] = order[positions[inside] % num_labels]
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedDocuments:
    """Documents with some of their completion slots masked."""

    ids: Tensor
    """[B, S] int64, masked."""
    clean: Tensor
    """[B, S] int64, unmasked."""
    lengths: Tensor
    """[B] int64, used slots."""
    sizes: Tensor
    """[B] int64, completion slots, masked or not."""
    rows: Tensor
    """[N] int64: the document of each masked slot, ascending."""
    columns: Tensor
    """[N] int64: the column of each masked slot in its document."""
    targets: Tensor
    """[N] int64: the token that was masked."""
    weights: Tensor
    """[N] float32: 1 / t of its document."""

    def select(self, documents: Tensor, width: int) -> MaskedDocuments:
        """Select documents by ascending indices and cut them to `width` slots, at least the length of the longest."""
        place_B = torch.full_like(self.lengths, -1)
        place_B[documents] = torch.arange(len(documents))
        rows_N = place_B[self.rows]
        inside = rows_N >= 0
        return MaskedDocuments(
            ids=self.ids[documents, :width],
            clean=self.clean[documents, :width],
            lengths=self.lengths[documents],
            sizes=self.sizes[documents],
            rows=rows_N[inside],
            columns=self.columns[inside],
            targets=self.targets[inside],
            weights=self.weights[inside],
        )

    def weightless(self) -> MaskedDocuments:
        """Return the first document with a weight of 0: what a rank runs while others have more micro-batches."""
        first = self.select(torch.tensor([0]), int(self.lengths[0]))
        return replace(first, weights=torch.zeros_like(first.weights))


def plan_sft(documents: Documents, mask_id: int, step: int, seed: int, batch_size: int) -> MaskedDocuments:
    """Mask the documents of one step, `batch_size` on all ranks, which are keyed by their position in the run."""
    start = uniform(torch.tensor(fold(seed, step, _T_KEY), device=documents.ids.device))
    place_B = (start + documents.sample_keys % batch_size / batch_size) % 1
    t_B = _MIN_T + (1 - _MIN_T) * place_B
    return mask_documents(documents, mask_id, t_B, (seed, step))


def mask_documents(documents: Documents, mask_id: int, t_B: Tensor, keys: tuple[int, ...]) -> MaskedDocuments:
    """Mask each completion slot with its document's probability `t_B`, drawn by the document's key and `keys`.

    A draw is also keyed by the slot's position in the completion, and by nothing else: neither by the row's neighbours,
    nor by a document's position when it is packed.
    """
    columns_S = torch.arange(documents.ids.shape[1], device=documents.ids.device)
    slots_BS = columns_S - documents.prompt_lengths[:, None]
    masked_BS = uniform(documents.sample_keys[:, None], *keys, _SLOT_KEY, slots_BS) < t_B[:, None]
    masked_BS &= (slots_BS >= 0) & (columns_S < documents.lengths[:, None])
    rows_N, columns_N = masked_BS.nonzero(as_tuple=True)
    return MaskedDocuments(
        ids=torch.where(masked_BS, mask_id, documents.ids),
        clean=documents.ids,
        lengths=documents.lengths,
        sizes=documents.lengths - documents.prompt_lengths,
        rows=rows_N,
        columns=columns_N,
        targets=documents.ids[rows_N, columns_N],
        weights=1.0 / t_B[rows_N],
    )


def masked_logps(
    model: Transformer,
    masked: MaskedDocuments,
    *,
    packing: bool = False,
    concatenates_rows: bool = False,
    annealing_mask_SS: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Compute the log-probability, in nats, of the token of each masked slot: [N] float32.

    Args:
        model: the policy.
        masked: on the CPU.
        packing: whether several short documents share a row.
        concatenates_rows: whether all documents are concatenated without padding; `packing` then has no effect.
        annealing_mask_SS: attention mask, if not the policy's own (`annealing.py`); not for concatenated documents.
        device: where the model computes; None: where its weights are.
    """
    device = device or next(model.parameters()).device
    if packing and not concatenates_rows:
        return _packed_logps(model, masked, annealing_mask_SS, device)
    scored = masked.lengths, masked.rows, masked.columns, masked.targets
    views = views_of(masked.ids, *scored, clean_RS=masked.clean, block_length=model.config.block_length)
    views = replace(views, concatenates_rows=concatenates_rows, attention_mask=annealing_mask_SS)
    return token_logps(model, views, SOFTMAX, device)


def _packed_logps(
    model: Transformer, masked: MaskedDocuments, annealing_mask_SS: Tensor | None, device: torch.device
) -> Tensor:
    assert not model.config.is_block_causal, "the run refuses to pack: rows of blocks are no documents"
    # No row is wider than the widest document: it takes no more memory than a row that is not packed.
    packed = pack(masked.ids, masked.lengths, masked.ids.shape[1])
    num_rows, width = packed.ids.shape
    slots_N = packed.rows[masked.rows] * width + packed.starts[masked.rows] + masked.columns
    ascending_N, order_N = slots_N.sort()
    queries = (to_device_async(part, device) for part in query_grid(ascending_N, num_rows, width))
    slot_N = torch.arange(len(order_N))
    targets = Targets(
        slot=to_device_async(slot_N, device),
        slot_on_host=slot_N,
        token=to_device_async(masked.targets[order_N], device),
    )
    ids_RW, documents_RW = to_device_async(packed.ids, device), to_device_async(packed.documents, device)
    annealing_mask_SS = None if annealing_mask_SS is None else to_device_async(annealing_mask_SS, device)
    logps_N: Tensor = model(
        ids_RW, None, *queries, documents_BL=documents_RW, annealing_mask_SS=annealing_mask_SS, targets=targets
    )
    return logps_N[to_device_async(order_N.argsort(), device)]
