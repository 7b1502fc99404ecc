"""Token automaton: converts an automaton over bytes to a grammar over a tokenizer's ids.

Shape letters: V vocabulary, S states, C classes of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.grammar.grammar import NOWHERE, Grammar

MAX_ENTRIES = 2**22
"""Maximum states times classes: 8 MB, which are sent with each request."""
_STATES_AT_ONCE = 64
_SEED = 20261126


class _Level(NamedTuple):
    """Trie level: the distinct token prefixes of one length in bytes. `tokens` and `places` are parallel."""

    parents: NDArray[np.int64]
    """Index of each prefix without its last byte, in the level before."""
    last_bytes: NDArray[np.int64]
    """Last byte of each prefix."""
    tokens: NDArray[np.int64]
    """Ids of the tokens that end at this level."""
    places: NDArray[np.int64]
    """Index of the prefix of each of these tokens, in this level."""


class TokenTrie:
    """Trie over the bytes of a vocabulary's tokens."""

    def __init__(self, token_bytes: Sequence[bytes | None], vocab_size: int) -> None:
        """Build the trie.

        Args:
            token_bytes: bytes of each id; None for ids without text, such as special tokens.
            vocab_size: V; ids without an entry have no text.
        """
        self._vocab_size = vocab_size
        self._spelled = [*token_bytes, *[None] * (vocab_size - len(token_bytes))]
        self._levels: list[_Level] = []
        spelled = [(token, spelling) for token, spelling in enumerate(token_bytes[:vocab_size]) if spelling]
        known, length = {b"": 0}, 0
        while spelled:
            length += 1
            level: dict[bytes, int] = {}
            parents, last, tokens, places = [], [], [], []
            for token, spelling in spelled:
                start = spelling[:length]
                if start not in level:
                    level[start] = len(level)
                    parents.append(known[start[:-1]])
                    last.append(start[-1])
                if len(spelling) == length:
                    tokens.append(token)
                    places.append(level[start])
            self._levels.append(_Level(*(np.array(part, dtype=np.int64) for part in (parents, last, tokens, places))))
            known, spelled = level, [one for one in spelled if len(one[1]) > length]

    def grammar(self, next_byte: NDArray[np.int16], accepting: NDArray[np.bool_]) -> Grammar:
        """Convert an automaton over bytes to a grammar without a length limit.

        Raises ValueError if the grammar is too large.
        """
        num_states = len(accepting)
        # One extra row for the dead state. It is the last, so that `NOWHERE` (-1) indexes it.
        table = np.concatenate([next_byte, np.full((1, 256), NOWHERE, dtype=np.int16)])
        # Tokens with equal transitions from every state form a class, identified by a 64-bit hash of the transitions.
        keys_S = np.random.default_rng(_SEED).integers(1, 2**63, size=num_states, dtype=np.uint64)
        hash_V = np.zeros(self._vocab_size, dtype=np.uint64)
        for start in range(0, num_states, _STATES_AT_ONCE):
            states = np.arange(start, min(start + _STATES_AT_ONCE, num_states))
            hash_V += self._walk(table, states).view(np.uint16).astype(np.uint64) @ keys_S[states]
        _, first_C, class_of_V = np.unique(hash_V, return_index=True, return_inverse=True)
        if num_states * len(first_C) > MAX_ENTRIES:
            raise ValueError(f"leads {len(first_C)} kinds of tokens through {num_states} states, which is too many")
        next_state = np.stack([_walk_one(table, self._spelled[token]) for token in first_C], axis=1)
        return Grammar(
            class_of=class_of_V.reshape(-1).astype(np.int32),
            next_state=np.ascontiguousarray(next_state),
            accepting=accepting,
            most_tokens=2**31 - 1,
        )

    def _walk(self, table: NDArray[np.int16], states: NDArray[np.int64]) -> NDArray[np.int16]:
        """Return [V, states]: the state that each token leads to from each of `states`."""
        reached_V = np.full((self._vocab_size, len(states)), NOWHERE, dtype=np.int16)
        here = states.astype(np.int16)[None]
        for level in self._levels:
            here = table[here[level.parents], level.last_bytes[:, None]]
            reached_V[level.tokens] = here[level.places]
        return reached_V


def _walk_one(table: NDArray[np.int16], spelling: bytes | None) -> NDArray[np.int16]:
    """Return [S]: the state that one token leads to from every state."""
    num_states = len(table) - 1
    if not spelling:
        return np.full(num_states, NOWHERE, dtype=np.int16)
    here = np.arange(num_states, dtype=np.int16)
    for byte in spelling:
        here = table[here, byte]
    return here
