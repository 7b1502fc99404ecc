"""Grammar constraints in a batch: which tokens a step may commit, and which samples fit together.

A step samples all slots of a block independently. So each slot is first restricted to the tokens that fit those already
committed. Then the sampled tokens are committed from left to right. A slot whose token no longer fits stays masked for
a later step. The first always fits, so every step commits something, and a row takes as many steps as it needs.

Shape letters: A active rows, K slots of a block, N open slots, M slots that are committed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learner.batch import to_device_async
from learner.model.config import TransformerConfig
from rollout.batch_state import BatchState, on_device
from rollout.forwards import ActiveRow, SlotLogits
from rollout.grammar.canvas_grammar import CanvasGrammar
from rollout.request import Request, canvas_grammar_of
from rollout.step import CommittedTokens


class ConstrainedRows:
    """Grammars of the rows of a batch, by slot of the engine."""

    def __init__(self, state: BatchState, config: TransformerConfig) -> None:
        """Begin without grammars."""
        self._state, self._config = state, config
        self._grammars: dict[int, CanvasGrammar] = {}

    @property
    def is_any(self) -> bool:
        """Whether any row has a grammar."""
        return bool(self._grammars)

    def admit(self, slot: int, request: Request) -> None:
        """Add the grammar of a request that enters, if it has one."""
        grammar = canvas_grammar_of(request, self._config)
        if grammar is not None:
            self._grammars[slot] = grammar

    def forget(self, slot: int) -> None:
        """Drop the grammar of a row that left."""
        self._grammars.pop(slot, None)

    def forbid(self, active: Sequence[ActiveRow], columns_AK: Tensor, found: SlotLogits) -> None:
        """Set the logits of tokens that do not fit to -inf. Synchronizes with the device if a row has a grammar."""
        rows = {index: row for index, row in enumerate(active) if row.slot in self._grammars}
        if not rows:
            return
        num_places = columns_AK.shape[1]
        columns_N = columns_AK.flatten()[found.index].cpu().numpy()
        owner_N = (found.index // num_places).cpu().numpy()
        for index, row in rows.items():
            grammar = self._updated(row)
            slots_N = columns_N - len(row.request.prompt_ids)
            is_mine_N = (owner_N == index) & (slots_N >= 0) & (slots_N < grammar.num_slots)
            places = [place for place in is_mine_N.nonzero()[0] if grammar.is_masked(slots_N[place])]
            if places:
                allowed = np.stack([grammar.allowed(slots_N[place]) for place in places])
                self._restrict(found, places, grammar, allowed)

    def fitting(
        self, active: Sequence[ActiveRow], where: tuple[Tensor, Tensor], sampled: CommittedTokens, chosen_M: Tensor
    ) -> Tensor:
        """Return [M] bool: which of the chosen slots are committed.

        Args:
            active: the rows of this step.
            where: slots of the engine and columns of the candidates, [M] each.
            sampled: their sampled tokens.
            chosen_M: bool, which of them the schedules chose.
        """
        rows = {row.slot: row for row in active if row.slot in self._grammars}
        if not rows:
            return chosen_M
        slots_M, columns_M, tokens, chosen = (part.cpu().numpy() for part in (*where, sampled.tokens, chosen_M))
        fits_M = chosen.copy()
        for slot, row in rows.items():
            places = (chosen & (slots_M == slot)).nonzero()[0]
            at_M = columns_M - len(row.request.prompt_ids)
            if len(places):
                fit = self._grammars[slot].fitting({int(at_M[place]): int(tokens[place]) for place in places})
                fits_M[places] = [int(at_M[place]) in fit for place in places]
        return on_device(fits_M, chosen_M.device)

    def _updated(self, row: ActiveRow) -> CanvasGrammar:
        grammar, start = self._grammars[row.slot], len(row.request.prompt_ids)
        span, canvases = slice(start, start + grammar.num_slots), self._state.canvases
        tokens, masked = (part[row.slot, span].cpu().numpy() for part in (canvases.tokens, canvases.masked))
        grammar.update(tokens, masked)
        return grammar

    def _restrict(self, found: SlotLogits, places: list[int], grammar: CanvasGrammar, allowed: np.ndarray) -> None:
        device = found.logits.device
        source = found.source[on_device(places, device)]
        class_of_V = to_device_async(torch.from_numpy(grammar.class_of_V).long(), device)
        is_allowed = to_device_async(torch.from_numpy(allowed), device)[:, class_of_V]
        found.logits[source] = found.logits[source].masked_fill(~is_allowed, -torch.inf)
