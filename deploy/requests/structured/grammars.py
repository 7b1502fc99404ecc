"""Grammar cache: compiles structures to grammars of one tokenizer, and keeps the latest."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import cached_property
from threading import Lock

from deploy.requests.structured.byte_automaton import AutomatonError, byte_automaton, check_length
from deploy.requests.structured.schema import SchemaError, library_schema
from deploy.requests.structured.structure import Structure
from learner.model.tokenizer import ChatTokenizer
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar
from rollout.grammar.token_automaton import TokenTrie

_MOST_KEPT = 32


class Grammars:
    """Compiler and LRU cache of grammars. Thread-safe."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        """Compile to the tokens of `tokenizer`, for a policy with `vocab_size` ids."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._kept = OrderedDict[tuple[str, str], Grammar | str]()
        self._lock = Lock()

    def of(self, structure: Structure) -> Grammar:
        """Return the grammar of a structure. Raises FieldError of `grammar` if the structure is not supported."""
        key = structure.kind, structure.text
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = self._make(structure)
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        if isinstance(found, str):
            raise FieldError("{grammar} {what}", what=found)
        return found

    def has(self, structure: Structure) -> bool:
        """Return whether the result of `of` is cached."""
        with self._lock:
            return (structure.kind, structure.text) in self._kept

    def _make(self, structure: Structure) -> Grammar | str:
        """Compile the grammar, or return the reason why it is not supported."""
        try:
            # Checked before references are resolved, which takes time.
            check_length(structure.text)
            return self._trie.grammar(*byte_automaton(*library_arguments(structure)))
        except (SchemaError, AutomatonError, ValueError) as error:
            return str(error)

    @cached_property
    def _trie(self) -> TokenTrie:
        return TokenTrie(self._tokenizer.token_bytes(), self._vocab_size)


def library_arguments(structure: Structure) -> tuple[str, str]:
    """Return the arguments for `byte_automaton`. Raises SchemaError if the schema is not supported."""
    if structure.kind == "regex":
        return structure.kind, structure.text
    return structure.kind, json.dumps(library_schema(json.loads(structure.text)))
