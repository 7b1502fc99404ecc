"""Constrained decoding in any order of slots: which tokens a masked slot may take under a grammar.

Slots are committed in any order, so states are propagated from both ends. The forward pass finds the states that the
slots before a position can reach. The backward pass finds the states from which the slots after it can complete a text.
A token is allowed in a slot if it leads from one of the former to one of the latter. (DINGO, arXiv 2505.23061, finds
the most probable such string with the same two passes. Here the schedule chooses the slots, and tokens are sampled from
the policy's distribution, restricted to the allowed ones.)

Shape letters: L slots of a completion, S states plus two, C classes plus two, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rollout.grammar.grammar import NOWHERE, Grammar

_MASKED = -1
_MAX_CACHED = 16


def masked_canvas(
    grammar: Grammar, num_slots: int, ends: Iterable[int], forbidden: Iterable[int], most_tokens: int
) -> CanvasGrammar:
    """Return the `CanvasGrammar` of a fully masked canvas, copied from a cache if it was made before."""
    ids = tuple(sorted(ends)), tuple(sorted(forbidden))
    return _masked_canvas(grammar, num_slots, *ids, most_tokens).copy()


@lru_cache(maxsize=_MAX_CACHED)
def _masked_canvas(
    grammar: Grammar, num_slots: int, ends: tuple[int, ...], forbidden: tuple[int, ...], most_tokens: int
) -> CanvasGrammar:
    return CanvasGrammar(grammar, num_slots, ends, forbidden, most_tokens)


class CanvasGrammar:
    """A grammar applied to one completion's canvas."""

    def __init__(
        self, grammar: Grammar, num_slots: int, ends: Iterable[int], forbidden: Iterable[int], most_tokens: int
    ) -> None:
        """Begin with all slots masked.

        Args:
            grammar: the allowed texts.
            num_slots: L.
            ends: the ids that may follow the text; after one of them only such ids may follow.
            forbidden: ids that are never committed.
            most_tokens: maximum slots of the text, where the canvas has more.
        """
        self.grammar, self.num_slots = grammar, num_slots
        self._most_tokens = min(grammar.most_tokens, most_tokens)
        num_states, num_classes = grammar.next_state.shape
        self._end, self._dead = num_states, num_states + 1
        self._ends, nothing = num_classes, num_classes + 1
        self.class_of_V = grammar.class_of.copy()
        """[V] the class of each token."""
        self.class_of_V[list(ends)] = self._ends
        self.class_of_V[list(forbidden)] = nothing
        self._next_SC = np.full((num_states + 2, num_classes + 2), self._dead, dtype=np.int32)
        inner = grammar.next_state
        self._next_SC[:num_states, :num_classes] = np.where(inner == NOWHERE, self._dead, inner)
        self._next_SC[:num_states, self._ends] = np.where(grammar.accepting, self._end, self._dead)
        self._next_SC[self._end, self._ends] = self._end
        # A class whose tokens are all forbidden or end ids leads nowhere.
        is_empty_C = np.bincount(self.class_of_V, minlength=num_classes + 2) == 0
        self._next_SC[:, is_empty_C] = self._dead
        self._next_SC[:, nothing] = self._dead
        self._after, self._before = self._neighbours(self._next_SC)
        self._classes_L = np.full(num_slots, _MASKED)
        self._forward = np.zeros((num_slots + 1, num_states + 2), dtype=bool)
        self._backward = np.zeros_like(self._forward)
        self._forward[0, 0] = True
        self._backward[num_slots, :num_states] = grammar.accepting
        self._backward[num_slots, self._end] = True
        self._allowed: dict[tuple[bool, bytes, bytes], NDArray[np.bool_]] = {}
        self._propagate(range(num_slots), range(num_slots - 1, -1, -1))

    def copy(self) -> CanvasGrammar:
        """Return an independent copy in its current state."""
        other = copy(self)
        other._classes_L, other._forward, other._backward = (
            part.copy() for part in (self._classes_L, self._forward, self._backward)
        )
        other._allowed = dict(self._allowed)
        return other

    def update(self, tokens_L: NDArray[np.int64], masked_L: NDArray[np.bool_]) -> None:
        """Update the reachable states to the current tokens and masks."""
        classes_L = np.where(masked_L, _MASKED, self.class_of_V[np.where(masked_L, 0, tokens_L)])
        changed = (classes_L != self._classes_L).nonzero()[0]
        if len(changed):
            self._classes_L = classes_L
            self._propagate(range(changed[0], self.num_slots), range(changed[-1], -1, -1))

    def is_masked(self, slot: int) -> bool:
        """Whether a slot is masked."""
        return bool(self._classes_L[slot] == _MASKED)

    @property
    def is_possible(self) -> bool:
        """Whether the canvas can still become a text of the grammar."""
        return bool(self._backward[0, 0])

    def allowed(self, slot: int) -> NDArray[np.bool_]:
        """Return [C] bool: the classes that a masked slot may take, at least one where `is_possible`."""
        is_text = slot < self._most_tokens
        here_S, after_S = self._forward[slot], self._backward[slot + 1]
        key = is_text, here_S.tobytes(), after_S.tobytes()
        if key not in self._allowed:
            allowed_C = after_S[self._next_SC[here_S]].any(axis=0)
            if not is_text:
                allowed_C[: self._ends] = False
            self._allowed[key] = allowed_C
        return self._allowed[key]

    def fitting(self, sampled: Mapping[int, int]) -> set[int]:
        """Return the masked slots whose sampled tokens are allowed together; each must be allowed alone.

        From left to right, a slot is kept if its token fits those kept before it. The first always does. One forward
        pass is enough: the backward pass already covers the slots after each.

        Args:
            sampled: the sampled token of each slot.
        """
        fit: set[int] = set()
        here_S = self._forward[min(sampled)]
        for slot in range(min(sampled), max(sampled) + 1):
            if slot in sampled:
                of_class = int(self.class_of_V[sampled[slot]])
                is_placed = slot < self._most_tokens or of_class == self._ends
                if is_placed and self._backward[slot + 1][self._next_SC[here_S, of_class]].any():
                    fit.add(slot)
                    here_S = self._after_class(here_S, of_class)
                    continue
            here_S = self._step(slot, here_S)
        return fit

    def _propagate(self, forward: Iterable[int], backward: Iterable[int]) -> None:
        """Recompute the forward states after some slots, and the backward states before some."""
        self._allowed.clear()
        for slot in forward:
            self._forward[slot + 1] = self._step(slot, self._forward[slot])
        for slot in backward:
            self._backward[slot] = self._step_back(slot, self._backward[slot + 1])

    def _step(self, slot: int, here_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
        of_class = self._class_at(slot)
        if of_class == _MASKED:
            return _union(self._after, here_S)
        return self._after_class(here_S, of_class)

    def _after_class(self, here_S: NDArray[np.bool_], of_class: int) -> NDArray[np.bool_]:
        reached_S = np.zeros_like(here_S)
        reached_S[self._next_SC[here_S, of_class]] = True
        reached_S[self._dead] = False
        return reached_S

    def _step_back(self, slot: int, after_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
        of_class = self._class_at(slot)
        return _union(self._before, after_S) if of_class == _MASKED else after_S[self._next_SC[:, of_class]]

    def _class_at(self, slot: int) -> int:
        """Return the class in a slot, or `_MASKED`. After the longest text only an end id is possible."""
        of_class = int(self._classes_L[slot])
        if slot < self._most_tokens:
            return of_class
        return self._ends if of_class in (_MASKED, self._ends) else self._ends + 1

    def _neighbours(self, next_SC: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return each state's successors and predecessors by one token, [S, S / 8] as bits."""
        num_states = len(next_SC)
        follows_SS = np.zeros((num_states, num_states), dtype=bool)
        follows_SS[np.arange(num_states)[:, None], next_SC] = True
        follows_SS[:, self._dead] = False
        return np.packbits(follows_SS, axis=1), np.packbits(follows_SS.T, axis=1)


def _union(neighbours: NDArray[np.uint8], states_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [S] bool: the union of the neighbours of some states."""
    bits = np.bitwise_or.reduce(neighbours[states_S], axis=0)
    return np.unpackbits(bits, count=len(states_S)).astype(bool)
