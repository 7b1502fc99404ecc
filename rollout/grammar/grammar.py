"""A grammar: a finite automaton over token ids that accepts the allowed completions.

Shape letters: V vocabulary, S states, C classes of tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
"""Entry of `next_state` where no text of the grammar continues with the token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grammar:
    """Automaton of the allowed texts, without the end of text that may follow. State 0 is the start state."""

    class_of: NDArray[np.int32]
    """[V] the equivalence class of each token: from any state, all tokens of a class lead to the same state."""
    next_state: NDArray[np.int16]
    """[S, C] the state after a token of a class, or `NOWHERE`."""
    accepting: NDArray[np.bool_]
    """[S] whether a text may end there."""
    most_tokens: int
    """Maximum tokens of a text, without the end of text."""

    @property
    def num_states(self) -> int:
        """S, the number of states."""
        return len(self.accepting)

    @cached_property
    def digest(self) -> str:
        """Hash of the automaton, equal for equal grammars."""
        parts = (self.class_of, self.next_state, self.accepting, np.array([self.most_tokens, *self.next_state.shape]))
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def fewest_tokens(self) -> int | None:
        """Tokens of the shortest text; None if the grammar has no text."""
        is_here, is_seen = np.zeros((2, self.num_states), dtype=bool)
        is_here[:1] = True
        num_tokens = 0
        while is_here.any():
            if (is_here & self.accepting).any():
                return num_tokens
            is_seen |= is_here
            reached = self.next_state[is_here].ravel()
            is_here = np.zeros_like(is_seen)
            is_here[reached[reached != NOWHERE]] = True
            is_here &= ~is_seen
            num_tokens += 1
        return None
