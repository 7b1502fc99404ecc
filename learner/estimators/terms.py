"""Terms: the scored tokens of a round's views, with their weights in likelihood and loss.

An estimator returns a `Corruption`: for each canvas to run, its row, and its masked and scored slots. All estimators
share the rest: joining prompts, merging equal canvases, packing, the head, gradients.

Shape letters: B rows of the batch, P prompt, L completion slots, R canvases, V different canvases, N terms.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from learner.batch import CompletionBatch, join_canvas, to_device_async
from learner.estimators.block_views import views_of
from learner.estimators.groupings import Grouping, Level, TermLayout, grouped
from learner.estimators.views import SOFTMAX, ScoringDistribution, Views
from learner.model.config import TransformerConfig
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """The corrupted canvases that an estimator requests."""

    rows: Tensor
    """[R] int64: the batch's row of each canvas, ascending."""
    masked: Tensor
    """[R, L] bool: the completion slots that hold the mask id."""
    scored: Tensor
    """[R, L] bool: the slots whose token is scored: masked ones, and under token editing others too."""
    prompt_masked: Tensor | None = None
    """[R, P] bool: the prompt tokens that hold the mask id; None: none."""
    parts: Tensor | None = None
    """[R] int64: the number of a canvas's draw or segment within its row; None: every canvas is part 0."""
    weights: Tensor | None = None
    """[R, L] float32: factor of a log-probability in the value of its token or row; None: 1."""
    importance: Tensor | None = None
    """[R, L] float32: weight of a scored token in the loss; None: 1."""
    distribution: ScoringDistribution = SOFTMAX
    """The distribution that tokens are scored under."""
    rivals: Tensor | None = None
    """[R, L] bool: slots that were still masked after the scored ones were committed; None: the order is not scored."""
    shown: Tensor | None = None
    """[R, L] int64: the tokens in unmasked slots; None: those of the completion."""
    targets: Tensor | None = None
    """[R, L] int64: the tokens to score; None: those of the completion."""
    recorded: Tensor | None = None
    """[R, L] float32: the sampler's log-probabilities of the targets; None: those of the batch."""
    committed: Tensor | None = None
    """[R, L] bool: the scored slots that the sampler committed in the state of the canvas; None: all."""

    def of_canvases(self, kept_R: Tensor) -> Corruption:
        """Select some of the canvases."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        kept: dict[str, Any] = {name: value[kept_R] for name, value in given.items() if isinstance(value, torch.Tensor)}
        return replace(self, **kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Scored tokens, in the order of their views.

    If the commit order is scored, there are also terms of the tokens' logits and of the highest logit of each rival.
    """

    views: Views
    """The canvases and their scored slots. They stay on the CPU, wherever the terms are."""
    distribution: ScoringDistribution
    """The distribution that tokens are scored under."""
    rows: Tensor
    """[N] int64: the batch's row."""
    slots: Tensor
    """[N] int64: the completion slot."""
    parts: Tensor
    """[N] int64: the draw or segment within the row."""
    weights: Tensor
    """[N] float32: factor of the log-probability in the value of its token or row."""
    importance: Tensor
    """[N] float32: weight in the loss."""
    recorded: Tensor | None = None
    """[N] float32: the sampler's log-probability, nats; None: that of the batch's row and slot."""
    committed: Tensor | None = None
    """[N] bool: the sampler committed the token in the state of its canvas; None: all."""
    layout: TermLayout | None = None
    """Facts computed on the CPU before the terms were copied to a device; None: they are computed when needed."""

    @property
    def num_terms(self) -> int:
        """N."""
        return len(self.rows)

    @property
    def token_weights(self) -> Tensor:
        """The weights [N], 0 for logits."""
        is_logit_N = self.views.is_logit if self.layout is None else self.layout.is_logit
        return self.weights if is_logit_N is None else self.weights.masked_fill(is_logit_N, 0.0)

    def of_tokens(self, values_N: Tensor) -> Tensor:
        """Select the values of terms that are log-probabilities."""
        tokens_T = self.laid_out.tokens
        return values_N if tokens_T is None else values_N[tokens_T]

    @property
    def laid_out(self) -> TermLayout:
        """The layout, computed if it is None."""
        if self.layout is not None:
            return self.layout
        is_logit_N = self.views.is_logit
        return TermLayout(
            groupings={level: self.grouping(level) for level in Level},
            num_parts=int(self.parts.max()) + 1,
            is_logit=is_logit_N,
            is_rival=None if is_logit_N is None else is_logit_N & (self.views.targets < 0),
            tokens=None if is_logit_N is None else (~is_logit_N).nonzero()[:, 0],
        )

    def grouping(self, level: Level) -> Grouping:
        """Group the terms into units of a level."""
        return grouped(self.rows, unit_keys(self, level)) if self.layout is None else self.layout.groupings[level]

    def on(self, device: torch.device) -> Terms:
        """Compute the layout, and copy all that a loss needs to a device."""
        moved: dict[str, Any] = {name: to_device_async(value, device) for name, value in self._given().items()}
        return replace(self, layout=self.laid_out.to(device), **moved)

    def of_views(self, first: int, last: int) -> Terms:
        """Select the terms of views `first` to `last - 1`, and cut the canvases to the longest of them."""
        views, old_width = self.views, self.views.ids.shape[1]
        width = int(views.lengths[first:last].max())
        of_slots = torch.searchsorted(views.slots, torch.tensor([first, last], device=self.rows.device) * old_width)
        begin, end = of_slots.tolist()
        inside = ((views.scored >= begin) & (views.scored < end)).nonzero()[:, 0]
        slots_M = views.slots[begin:end] - first * old_width
        cut = Views(
            ids=views.ids[first:last, :width],
            lengths=views.lengths[first:last],
            slots=slots_M // old_width * width + slots_M % old_width,
            scored=views.scored[inside] - begin,
            targets=views.targets[inside],
            is_logit=None if views.is_logit is None else views.is_logit[inside],
            blocks=None if views.blocks is None else views.blocks.cut(first, last, width),
            concatenates_rows=views.concatenates_rows,
        )
        return replace(self, views=cut, layout=None, **{name: value[inside] for name, value in self._given().items()})

    def _given(self) -> dict[str, Any]:
        """Return the tensors [N] that are not None, by name."""
        named = ((name, getattr(self, name)) for name in _OF_TERMS)
        return {name: value for name, value in named if value is not None}

    def weightless(self) -> Terms:
        """Return the first view with an importance of 0: what a rank runs while others have more micro-batches."""
        first = self.of_views(0, 1)
        return replace(first, importance=torch.zeros_like(first.importance))


_OF_TERMS = ("rows", "slots", "parts", "weights", "importance", "recorded", "committed")


def unit_keys(terms: Terms, level: Level) -> Tensor:
    """Return keys [N] int64 that are equal for terms of one unit."""
    if level is Level.ROW:
        return terms.rows
    if level is Level.CANVAS_TOKEN:
        return torch.arange(terms.num_terms, device=terms.rows.device)
    within = terms.slots if level is Level.TOKEN else terms.parts
    return terms.rows * (int(within.max()) + 1) + within


def make_terms(
    batch: CompletionBatch, model: TransformerConfig, corruption: Corruption, block_length: int | None = None
) -> Terms:
    """Build the views and terms of a corrupted batch.

    If nothing is scored, there is one view with one term of importance 0, so that a rank always has a forward to run.
    Under a block-causal policy views hold noisy blocks after the clean blocks before them (`block_views.py`).
    `block_length` is by default that of the config.
    """
    is_empty = not bool(corruption.scored.any())
    if is_empty:
        corruption = _of_one_token(batch, corruption.distribution)
    corruption = corruption.of_canvases(corruption.scored.any(dim=1))
    rows_R, masked_RL, mask_id = corruption.rows, corruption.masked, model.mask_token_id
    some = batch.select(rows_R)
    prompt_ids = some.prompt_ids
    if corruption.prompt_masked is not None:
        prompt_ids = torch.where(corruption.prompt_masked, mask_id, prompt_ids)
    shown_RL = some.completion_ids if corruption.shown is None else corruption.shown
    completion_ids = torch.where(masked_RL, mask_id, shown_RL)
    ids_RS, columns_RL = join_canvas(some, prompt_ids, completion_ids, model.pad_token_id)
    canvas_N, slots_N = corruption.scored.nonzero(as_tuple=True)
    targets_RL = some.completion_ids if corruption.targets is None else corruption.targets
    targets_N, is_logit_N = targets_RL[canvas_N, slots_N], None
    if corruption.rivals is not None:
        num_tokens, (rival_canvas, rival_slots) = len(canvas_N), corruption.rivals.nonzero(as_tuple=True)
        canvas_N, slots_N = torch.cat((canvas_N, canvas_N, rival_canvas)), torch.cat((slots_N, slots_N, rival_slots))
        targets_N = torch.cat((targets_N, targets_N, torch.full_like(rival_slots, -1)))
        is_logit_N = torch.arange(len(canvas_N), device=rows_R.device) >= num_tokens
    lengths_R = some.prompt_lengths + batch.num_slots
    views = views_of(
        ids_RS,
        lengths_R,
        canvas_N,
        columns_RL[canvas_N, slots_N],
        targets_N,
        clean_RS=ids_RS.scatter(1, columns_RL, some.completion_ids) if model.is_block_causal else ids_RS,
        block_length=(block_length or model.block_length) if model.is_block_causal else None,
    )
    order_N = views.scored.argsort(stable=True)
    views = replace(
        views,
        scored=views.scored[order_N],
        targets=views.targets[order_N],
        is_logit=None if is_logit_N is None else is_logit_N[order_N],
    )
    canvas_N, slots_N = canvas_N[order_N], slots_N[order_N]
    ones_N = torch.ones(len(order_N), device=rows_R.device)
    parts_R = torch.zeros_like(rows_R) if corruption.parts is None else corruption.parts
    importance_N = ones_N if corruption.importance is None else corruption.importance[canvas_N, slots_N]
    return Terms(
        views=views,
        distribution=corruption.distribution,
        rows=rows_R[canvas_N],
        slots=slots_N,
        parts=parts_R[canvas_N],
        weights=ones_N if corruption.weights is None else corruption.weights[canvas_N, slots_N],
        importance=torch.zeros_like(importance_N) if is_empty else importance_N,
        recorded=None if corruption.recorded is None else corruption.recorded[canvas_N, slots_N],
        committed=None if corruption.committed is None else corruption.committed[canvas_N, slots_N],
    )


def _of_one_token(batch: CompletionBatch, distribution: ScoringDistribution) -> Corruption:
    """Mask the first row completely, and score its first slot."""
    first = torch.zeros(1, dtype=torch.int64, device=batch.prompt_ids.device)
    masked = torch.ones_like(batch.completion_ids[:1], dtype=torch.bool)
    return Corruption(rows=first, masked=masked, scored=masked & (masked.cumsum(dim=1) == 1), distribution=distribution)
