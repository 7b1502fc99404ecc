"""Micro-batches of SFT: a rank's documents of a step, cut between whole rows.

Shape letters: B documents, N masked slots.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from learner.model.deferred import torch
from learner.parallel.micro_batches import cut_rows
from learner.sft.masking import MaskedDocuments
from learner.sft.packing import first_fit_decreasing

if TYPE_CHECKING:
    from torch import Tensor


def micro_batches(
    masked: MaskedDocuments, max_tokens: int, block_length: int | None, *, packing: bool, concatenates_rows: bool
) -> list[MaskedDocuments]:
    """Cut a rank's documents into micro-batches of whole rows.

    Args:
        masked: at least one document.
        max_tokens: maximum tokens of a micro-batch, padding included; a longer row is one by itself.
        block_length: of a block-causal policy; None for any other.
        packing: whether several short documents share a row.
        concatenates_rows: whether all documents are concatenated without padding, whatever `packing` is.
    """
    if packing and not concatenates_rows:
        return _of_packed_rows(masked, max_tokens)
    if block_length is None and masked.ids.numel() <= max_tokens:
        # Padded as without a limit, and so bit-identical to it.
        return [masked]
    parts, _ = cut_rows(_row_lengths(masked, block_length).tolist(), max_tokens, concatenates_rows=concatenates_rows)
    return [masked.select(torch.arange(part.start, part.stop), int(masked.lengths[part].max())) for part in parts]


def _of_packed_rows(masked: MaskedDocuments, max_tokens: int) -> list[MaskedDocuments]:
    """Cut the packed rows into runs.

    Packing the documents of some rows again gives the same rows, because first fit decreasing places each as before.
    """
    width = masked.ids.shape[1]
    rows = first_fit_decreasing(masked.lengths.tolist(), width)
    parts, _ = cut_rows([int(masked.lengths[row].sum()) for row in rows], max_tokens)
    return [masked.select(torch.tensor(sorted(chain(*rows[part]))), width) for part in parts]


def _row_lengths(masked: MaskedDocuments, block_length: int | None) -> Tensor:
    """Return the number of slots of each document's row, [B] int64.

    A block-causal policy's row has every scored block, after the clean blocks before the last of them
    (`learner/estimators/block_views.py`).
    """
    if block_length is None:
        return masked.lengths
    blocks_N, num_blocks = masked.columns // block_length, -(-masked.ids.shape[1] // block_length)
    scored_blocks_B = ((masked.rows * num_blocks + blocks_N).unique() // num_blocks).bincount(
        minlength=len(masked.lengths)
    )
    context_B = torch.zeros_like(masked.lengths).scatter_reduce_(0, masked.rows, blocks_N, "amax")
    return (context_B + scored_blocks_B) * block_length
