"""SFT examples, and batches of them as tensors.

Shape letters: B documents, S slots of the widest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from learner.batch import pad_rows
from learner.model.deferred import torch
from learner.parallel.dealing import RowCosts, deal

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.config import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedExample:
    """A prompt and its completion, or a chunk of a text, as token ids."""

    prompt_ids: tuple[int, ...]
    """The prompt, up to where the assistant's turn begins; empty for a text."""
    completion_ids: tuple[int, ...]
    """The completion, without an end of text."""
    num_slots: int
    """Completion slots of its canvas; at least the completion's length."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, with one end of text if the canvas has room for it."""
        return len(self.prompt_ids) + min(self.num_slots, len(self.completion_ids) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Prompts with their completions, one a row."""

    ids: Tensor
    """[B, S] int64: the prompt, the completion, and end of text up to the row's end."""
    prompt_lengths: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64: slots that the policy sees. Those after the prompt are trained on; a row that only pads a shard has
    none."""
    sample_keys: Tensor
    """[B] int64: the random key of all masks of the row; equal keys give equal masks."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.ids.shape[0]

    @property
    def num_trained(self) -> int:
        """The number of slots that are trained on, over all rows."""
        return int((self.lengths - self.prompt_lengths).sum())

    def predicted_by(self, policy: TransformerConfig) -> Self:
        """Exclude slots that the policy has no output for from training.

        If an output predicts the next slot, none predicts the first slot of a text without a prompt.
        """
        if not policy.predicts_next:
            return self
        return replace(self, prompt_lengths=self.prompt_lengths.clamp(min=1).minimum(self.lengths))

    def select(self, rows: Tensor | slice) -> Self:
        """Select the documents of some of the rows."""
        return replace(self, **{name: value[rows] for name, value in self.tensors().items()})

    def to(self, device: torch.device) -> Self:
        """Copy the documents to another device."""
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def shard(self, rank: int, world_size: int, *, by_tokens: bool) -> Self:
        """Select the rows of one rank, dealt by tokens, or equally many on each if every row costs as much.

        A rank without rows gets one that is not trained on.
        """
        lengths = self.lengths.tolist() if by_tokens else [1] * self.num_rows
        rows = deal(RowCosts.of_lengths(lengths), world_size)[rank]
        if rows:
            return self.select(torch.tensor(rows))
        first = self.select(slice(0, 1))
        return replace(first, lengths=first.prompt_lengths)


def make_documents(examples: Sequence[TokenizedExample], eos_id: int, *, trains_padding: bool) -> Documents:
    """Make documents of examples, keyed by their index.

    Args:
        examples: at least one.
        eos_id: follows each completion that leaves room for it, and fills its canvas.
        trains_padding: whether all of that padding belongs to the document, or only the first end of text.
    """
    canvas_lengths = [len(example.prompt_ids) + example.num_slots for example in examples]
    lengths = canvas_lengths if trains_padding else [example.num_tokens for example in examples]
    rows = [
        [*example.prompt_ids, *example.completion_ids, eos_id][:length]
        for example, length in zip(examples, lengths, strict=True)
    ]
    return Documents(
        ids=pad_rows(rows, eos_id, max(lengths)),
        prompt_lengths=torch.tensor([len(example.prompt_ids) for example in examples]),
        lengths=torch.tensor(lengths),
        sample_keys=torch.arange(len(examples)),
    )
