"""Views: the corrupted canvases that the policy runs, and the tokens that are scored on them.

Shape letters: V canvases, S slots of one, M scored slots, N scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from learner.batch import to_device_async
from learner.model.attention.rows import RaggedRows
from learner.model.deferred import torch
from learner.model.targets import Targets, TeacherStates, query_grid

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringDistribution:
    """The distribution that tokens are scored under."""

    temperature: float = 1.0
    """Logits are divided by it."""
    excludes_mask_id: bool = False
    """Whether the mask id has probability 0, as in the sampler's distribution. The plain softmax excludes nothing, so
    that probability mass on the mask id is penalised (as in d1)."""
    forbidden_ids: tuple[int, ...] = ()
    """Other ids with probability 0, as in the sampler's distribution."""
    float32_head: bool = False
    """Whether logits are in float32 although the policy computes in half precision."""


SOFTMAX = ScoringDistribution()
"""The plain softmax of the logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """Canvases to run and the tokens to score on them.

    Equal canvases are run once: the completions of a group differ only in tokens that an estimator may have masked.
    """

    ids: Tensor
    """[V, S] int64, corrupted."""
    lengths: Tensor
    """[V] int64, used slots."""
    slots: Tensor
    """[M] int64, ascending indices into the flattened [V * S] canvases."""
    scored: Tensor
    """[N] int64, the index into `slots` of each scored token."""
    targets: Tensor
    """[N] int64, the tokens to score; -1: the one with the highest logit."""
    is_logit: Tensor | None = None
    """[N] bool: where the logit is computed instead of the log-probability; None: nowhere."""
    blocks: BlockRows | None = None
    """Layout of the rows for a block-causal policy; None: each row is a canvas."""
    concatenates_rows: bool = False
    """Whether canvases of unequal length are concatenated without padding. Otherwise they are padded and masked."""
    attention_mask: Tensor | None = None
    """[S, S] bool: an attention mask over the columns of a canvas, applied on top of the policy's own. Not for
    concatenated canvases. None: the policy's own attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRows:
    """Layout of rows that hold a clean canvas and noisy states of its blocks (`block_views.py`)."""

    columns: Tensor
    """[V, S] int64: the canvas column of each slot."""
    states: Tensor
    """[V, S] int64: the state that each slot belongs to, or `CLEAN` or `PADDING` (`learner/model/targets.py`)."""
    block_length: int
    """Slots of a block."""

    def cut(self, first: int, last: int, width: int) -> BlockRows:
        """Select some rows, and cut them to a width."""
        rows = slice(first, last), slice(width)
        return replace(self, columns=self.columns[rows], states=self.states[rows])


def deduplicated_views(
    ids_BS: Tensor, lengths_B: Tensor, rows_N: Tensor, columns_N: Tensor, targets_N: Tensor
) -> Views:
    """Build views of one canvas per row, with equal canvases merged; token n is on row `rows_N`, slot `columns_N`.

    Views keep the order of the first row that each serves.
    """
    first_V, view_B = unique_rows(ids_BS)
    slots_M, scored_N = (view_B[rows_N] * ids_BS.shape[1] + columns_N).unique(return_inverse=True)
    return Views(ids=ids_BS[first_V], lengths=lengths_B[first_V], slots=slots_M, scored=scored_N, targets=targets_N)


def unique_rows(rows_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first occurrence of each distinct row, [V] ascending, and which distinct row each row equals, [B]."""
    # Hashing a few thousand rows takes a fifth of the time of sorting them.
    first_of: dict[bytes, int] = {}
    first_B = [first_of.setdefault(row.tobytes(), place) for place, row in enumerate(rows_BS.cpu().numpy())]
    first_V = torch.tensor(list(first_of.values()), dtype=torch.int64, device=rows_BS.device)
    return first_V, torch.searchsorted(first_V, torch.tensor(first_B, dtype=torch.int64, device=rows_BS.device))


def token_logps(
    model: Transformer,
    views: Views,
    distribution: ScoringDistribution = SOFTMAX,
    device: torch.device | None = None,
    teacher: TeacherStates | None = None,
) -> Tensor:
    """Compute the log-probability, in nats, or the logit of each scored token: [N] float32, on the model's device.

    Args:
        model: the policy.
        views: on the CPU, so that sizes are known without waiting for a device.
        distribution: the distribution.
        device: where the model computes; None: where its weights are.
        teacher: a teacher's hidden states, in the order of the scored tokens; the result is then the divergence from
            its distributions.
    """
    device = device or next(model.parameters()).device
    rows, keywords = _rows(views, device)
    # The head runs over chunks of slots, in ascending order.
    order_N = views.scored.argsort(stable=True)
    slot_N = views.scored[order_N]
    targets = Targets(
        slot=to_device_async(slot_N, device),
        slot_on_host=slot_N,
        token=to_device_async(views.targets[order_N], device),
        is_logit=None if views.is_logit is None else to_device_async(views.is_logit[order_N], device),
        temperature=distribution.temperature,
        mask_id=model.config.mask_token_id,
        excludes_mask_id=distribution.excludes_mask_id,
        forbidden_ids=distribution.forbidden_ids,
        float32_head=distribution.float32_head,
        teacher=None if teacher is None else _reordered(teacher, order_N, device),
    )
    logps_N: Tensor = model(*rows, targets=targets, **keywords)
    return torch.empty_like(logps_N).scatter(0, to_device_async(order_N, device), logps_N)


def _reordered(teacher: TeacherStates, order_N: Tensor, device: torch.device) -> TeacherStates:
    """Return a teacher's states in another order of the target tokens."""
    chosen_K = teacher.chosen
    if chosen_K is not None:
        chosen_K = to_device_async(order_N.argsort(), device)[chosen_K]
    return replace(teacher, head_input=teacher.head_input[to_device_async(order_N, device)], chosen=chosen_K)


def token_hidden_states(model: Transformer, views: Views, device: torch.device) -> Tensor:
    """Compute the head's input at each scored token's slot, [N, D], on the model's device; `views` are on the CPU."""
    rows, keywords = _rows(views, device)
    head_input_MD: Tensor = model(*rows, before_head=True, **keywords)
    return head_input_MD[to_device_async(views.scored, device)]


def token_values(model: Transformer, views: Views, device: torch.device) -> Tensor:
    """Compute a value network's output at each scored token's slot, [N], on its device; `views` are on the CPU."""
    rows, keywords = _rows(views, device)
    values_M1: Tensor = model(*rows, **keywords)
    return values_M1[to_device_async(views.scored, device), 0]


_Rows = tuple[tuple["Tensor | None", ...], dict[str, Any]]
"""Arguments of `Transformer.forward`: ids, lengths, queries and which of these are scored; and keyword arguments."""


def _rows(views: Views, device: torch.device) -> _Rows:
    """Convert views to the model's arguments."""
    is_full = views.blocks is not None or bool((views.lengths == views.ids.shape[1]).all())
    # Without scored slots there would be no queries.
    is_ragged = views.concatenates_rows and not is_full and len(views.slots) > 0
    return _concatenated(views, device) if is_ragged else _padded(views, device, is_full=is_full)


def _padded(views: Views, device: torch.device, *, is_full: bool) -> _Rows:
    """Convert canvases to one padded row each."""
    lengths_V = None if is_full else to_device_async(views.lengths, device)
    grid = (to_device_async(part, device) for part in query_grid(views.slots, *views.ids.shape))
    keywords: dict[str, Any] = (
        {} if views.attention_mask is None else {"annealing_mask_SS": to_device_async(views.attention_mask, device)}
    )
    if views.blocks is not None:
        keywords |= {
            "columns_BL": to_device_async(views.blocks.columns, device),
            "states_BL": to_device_async(views.blocks.states, device),
            "block_lengths_B": to_device_async(torch.full_like(views.lengths, views.blocks.block_length), device),
        }
    return (to_device_async(views.ids, device), lengths_V, *grid), keywords


def _concatenated(views: Views, device: torch.device) -> _Rows:
    """Concatenate all canvases in one row, without padding."""
    lengths_V, width = views.lengths, views.ids.shape[1]
    rows_M, columns_M = views.slots // width, views.slots % width
    begins_V = lengths_V.cumsum(0) - lengths_V
    grid = (to_device_async(part, device) for part in query_grid(begins_V[rows_M] + columns_M, 1, int(lengths_V.sum())))
    is_used_VS = torch.arange(width) < lengths_V[:, None]
    ragged = RaggedRows.of(
        lengths_V, rows_M.bincount(minlength=len(lengths_V)), partial(to_device_async, device=device)
    )
    return (to_device_async(views.ids[is_used_VS][None], device), None, *grid), {"ragged": ragged}
