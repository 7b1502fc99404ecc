"""Batches of completions: the tensors that the learner trains on.

Shape letters: B rows, P longest prompt, L completion slots, S = P + L canvas, G groups, K reward parts, E writes,
T denoise steps of the longest trajectory, D levels of a rollout tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionBatch:
    """Prompts and their completions: the input of every likelihood estimator."""

    prompt_ids: Tensor
    """[B, P] int64, left-aligned."""
    prompt_lengths: Tensor
    """[B] int64."""
    completion_ids: Tensor
    """[B, L] int64, end of text after the completion's end."""
    completion_lengths: Tensor
    """[B] int64: tokens up to and including the first end of text. 0 marks a row that only pads a shard."""
    sample_keys: Tensor
    """[B] int64: the random key of all masks of the row; equal keys give equal masks."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.prompt_ids.shape[0]

    @property
    def num_slots(self) -> int:
        """L."""
        return self.completion_ids.shape[1]

    def select(self, rows: Tensor | slice) -> Self:
        """Return the batch of some of the rows."""
        return replace(self, **{name: value[rows] for name, value in self.given().items()})

    def to(self, device: torch.device) -> Self:
        """Copy the batch to another device."""
        return replace(self, **{name: to_device_async(value, device) for name, value in self.given().items()})

    def given(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if value is not None}

    def completion_mask(self) -> Tensor:
        """Return the slots up to and including the first end of text, [B, L] bool."""
        slots = torch.arange(self.num_slots, device=self.completion_ids.device)
        return slots < self.completion_lengths[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch(CompletionBatch):
    """One round's completions. The rows of a group are contiguous."""

    rewards: Tensor
    """[B] float32."""
    reward_parts: Tensor
    """[B, K] float32: the components of the rewards."""
    correct: Tensor
    """[B] bool: the answer is right."""
    truncated: Tensor
    """[B] bool: the completion reached the length limit without an end of text."""
    is_stop: Tensor
    """[B, L] bool: the slot's token is one of those that end a text."""
    group_ids: Tensor
    """[B] int64: rows of one problem share it."""
    step_map: Tensor
    """[B, L] int64: the denoise step that committed a slot, -1 where none did."""
    commit_logp: Tensor
    """[B, L] float32, nats, under the distribution that was sampled from; 0 where nothing was committed."""
    commit_entropy: Tensor
    """[B, L] float32, nats, of the untempered prediction at commit; 0 where nothing was committed."""
    commit_law_entropy: Tensor
    """[B, L] float32, nats, of the distribution that the token was sampled from; 0 where nothing was committed."""
    fallback: Tensor
    """[B, L] bool: committed only because a step commits at least one."""
    num_forwards: Tensor
    """[B] int64: forward passes that the completion took part in; 0 if it was stored and not sampled."""
    policy_versions: Tensor
    """[B] int64: the version that sampled the row."""
    process_rewards: Tensor | None = None
    """[B, L] float32: the reward of each block, which `rewards` includes, at the slots of the text that the block's
    last step committed; 0 elsewhere. None if no grader rewards blocks."""
    outcome_rewards: Tensor | None = None
    """[B] float32: `rewards` without those of blocks. None if no grader rewards blocks."""
    writes: Tensor | None = None
    """[B, E, 3] int64: denoise step, slot and token of every write in order, only under token editing. The fields above
    then describe the final tokens. -1 after a row's last write."""
    write_logp: Tensor | None = None
    """[B, E] float32: `commit_logp` of every write."""
    step_rewards: Tensor | None = None
    """[B, T] float32: the reward of each denoise step's answer, NaN where none was graded: of the greedy completion of
    the state before the step, or of `step_answers`. None if the method needs none; otherwise it trains the steps that
    have one."""
    step_answers: Tensor | None = None
    """[B, T, L] int32: the completion that each denoise step predicted, with a sample in every masked slot; -1 where
    none was recorded. None if the method does not score them."""
    node_keys: Tensor | None = None
    """[B, D] int64: keys of the nodes of a rollout tree that the completion passed through, one at the end of each
    level, the last one its own. Completions with an equal key have equal canvases there. None without a tree."""

    def speeds(self) -> Tensor:
        """Return the tokens per forward of each completion, [B] float32."""
        return self.completion_lengths / self.num_forwards.clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedBatch(RolloutBatch):
    """A round whose rows carry their group's facts, so that random masks are the same however ranks share the rows."""

    group_index: Tensor
    """[B] int64: 0, 1, ... in the order of the groups."""
    group_keys: Tensor
    """[B] int64: the key of the group's first row, for random draws that a group shares."""
    group_places: Tensor
    """[B] int64: the row's place in its group."""
    group_sizes: Tensor
    """[B] int64: rows of its group."""
    round_keys: Tensor
    """[B] int64: the key of the round's first row, for random draws that all rows share."""
    step_advantages: Tensor | None = None
    """[B, T] float32: the advantage of each denoise step, 0 where its answer was not graded, or of each node of a
    rollout tree. None if all have that of their completion."""
    sibling_targets: Tensor | None = None
    """[B, L, 2] float32, as in `RowFacts`, but for a factor of the weights. None without a consistency loss."""
    owns_node: Tensor | None = None
    """[B, D] bool: whether the row is the first that passed through each of its nodes, and stands for it."""

    @classmethod
    def of(cls, batch: RolloutBatch) -> GroupedBatch:
        """Add the facts of the groups to a round."""
        _, index_B, sizes_G = batch.group_ids.unique(return_inverse=True, return_counts=True)
        place_B = torch.arange(batch.num_rows)
        order = index_B.argsort(stable=True)
        begin_G = sizes_G.cumsum(0) - sizes_G
        within_B = torch.empty_like(order).scatter_(0, order, place_B - begin_G[index_B[order]])
        return cls(
            **batch.given(),
            group_index=index_B,
            group_keys=batch.sample_keys[first_rows(index_B)],
            group_places=within_B,
            group_sizes=sizes_G[index_B],
            round_keys=batch.sample_keys[:1].expand(batch.num_rows),
            owns_node=None if batch.node_keys is None else owned_nodes(batch.node_keys),
        )

    def minibatches(self, count: int, *, whole_groups: bool) -> list[Tensor]:
        """Return the rows of each minibatch: contiguous, about equally many, and whole groups with `whole_groups`.

        None is empty: there are fewer than `count` if there are fewer rows, or groups.
        """
        unit_B, num_units = self._units(whole_groups=whole_groups)
        count = min(count, num_units)
        return [(unit_B * count // num_units == index).nonzero()[:, 0] for index in range(count)]

    def _units(self, *, whole_groups: bool) -> tuple[Tensor, int]:
        """Return the indivisible unit of each row, [B] 0, 1, ..., a row or a group, and the number of units."""
        if not whole_groups:
            return torch.arange(self.num_rows), self.num_rows
        _, unit_B = self.group_index.unique(return_inverse=True)
        return unit_B, int(unit_B.max()) + 1

    def empty_row(self) -> GroupedBatch:
        """Return the first row with a length of 0: it has no token and so no gradient."""
        first = self.select(slice(0, 1))
        return replace(first, completion_lengths=torch.zeros_like(first.completion_lengths))


def first_rows(keys_B: Tensor) -> Tensor:
    """Return the first row with the key of each row, [B] int64."""
    keys_K, index_B = keys_B.unique(return_inverse=True)
    place_B = torch.arange(len(keys_B), device=keys_B.device)
    return torch.full_like(keys_K, len(keys_B)).scatter_reduce_(0, index_B, place_B, "amin")[index_B]


def owned_nodes(node_keys_BD: Tensor) -> Tensor:
    """Return whether each row is the first with its key at each level, [B, D] bool."""
    place_B = torch.arange(len(node_keys_BD), device=node_keys_BD.device)
    return torch.stack([first_rows(keys_B) == place_B for keys_B in node_keys_BD.unbind(1)], dim=1)


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from the CPU to a GPU asynchronously, through pinned memory."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pad_rows(rows: Sequence[Sequence[int]], fill: int, width: int | None = None) -> Tensor:
    """Stack sequences into int64 [len(rows), width], left-aligned, the rest `fill`."""
    width = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)


def join_canvas(
    batch: CompletionBatch, prompt_ids: Tensor, completion_ids: Tensor, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Join prompts and completions without a gap.

    Args:
        batch: gives the prompt lengths.
        prompt_ids: [B, P], may be masked.
        completion_ids: [B, L], may be masked.
        pad_id: fills the rest of a row.

    Returns:
        ids [B, S] and the column [B, L] of each completion slot in them.
    """
    B, P = prompt_ids.shape
    L = completion_ids.shape[1]
    columns_BL = batch.prompt_lengths[:, None] + torch.arange(L, device=prompt_ids.device)
    is_prompt = torch.arange(P, device=prompt_ids.device) < batch.prompt_lengths[:, None]
    ids_BS = torch.full((B, P + L), pad_id, dtype=prompt_ids.dtype, device=prompt_ids.device)
    ids_BS[:, :P] = torch.where(is_prompt, prompt_ids, pad_id)
    ids_BS.scatter_(1, columns_BL, completion_ids)
    return ids_BS, columns_BL
