"""CPU cost of structured output: compiling a grammar, and one constrained denoise step.

python -m benchmarks.service.grammars [--tokens 126464] [--slots 128] [--block 32]
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Callable

import numpy as np

from deploy.requests.structured.byte_automaton import byte_automaton
from deploy.requests.structured.grammars import library_arguments
from deploy.requests.structured.structure import Structure
from rollout.grammar.canvas_grammar import CanvasGrammar
from rollout.grammar.grammar import Grammar
from rollout.grammar.token_automaton import TokenTrie

_FIELDS = {f"field_{index}": {"type": "string", "maxLength": 20} for index in range(5)}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"street": {"type": "string"}}}]},
    },
    "required": ["name", "age", "tags", "address"],
}
_STRUCTURES = {
    "two choices": Structure.of_choices(["yes", "no"], ""),
    "expression of a date": Structure(kind="regex", text="[0-9]{4}-[0-9]{2}-[0-9]{2}", field=""),
    "schema of a person": Structure.of_schema(_PERSON, ""),
    "five strings of 20 characters": Structure.of_schema(
        {"type": "object", "properties": _FIELDS, "required": [*_FIELDS]}, ""
    ),
    "any JSON object": Structure.of_schema({"type": "object"}, ""),
}
_MASK, _END = 0, 1


def _vocabulary(num_tokens: int) -> list[bytes | None]:
    """Make a vocabulary like a byte-level BPE's: all bytes, then words (half with a leading space), numbers,
    punctuation and multi-byte characters."""
    draw, spelled = random.Random(0), [bytes([byte]) for byte in range(256)]
    known = set(spelled)
    while len(spelled) < num_tokens - 2:
        kind = draw.random()
        letters = string.ascii_letters if kind < 0.8 else string.digits + string.punctuation + " éß中文"
        text = ("" if draw.random() < 0.5 else " ") + "".join(
            draw.choices(letters, k=min(12, 2 + int(draw.expovariate(0.3))))
        )
        if (token := text.encode()) not in known:
            known.add(token)
            spelled.append(token)
    return [None, None, *spelled]


def _seconds(run: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - began) / times


def _step(grammar: Grammar, num_slots: int, block: int) -> tuple[float, float]:
    """Time the first step of a canvas and one in its middle, in CPU seconds.

    A step computes the allowed tokens of each masked slot of a block, and chooses tokens for about an eighth of them.
    """
    seen = CanvasGrammar(grammar, num_slots, [_END], [_MASK], num_slots)
    tokens, masked = np.zeros(num_slots, dtype=np.int64), np.ones(num_slots, dtype=bool)

    def step() -> None:
        seen.update(tokens, masked)
        allowed = {slot: seen.allowed(slot) for slot in range(block) if masked[slot]}
        slots = [*allowed][::2][: len(allowed) // 8 + 1]
        drawn = {slot: int(np.argmax(allowed[slot][seen.class_of_V])) for slot in slots}
        for slot in seen.fitting(drawn) if drawn else ():
            tokens[slot], masked[slot] = drawn[slot], False

    first = _seconds(step, 1)
    return first, _seconds(step, 4)


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=126_464, help="of the vocabulary; LLaDA's by default")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    asked = parser.parse_args()
    began = time.process_time()
    trie = TokenTrie(_vocabulary(asked.tokens), asked.tokens)
    print(f"{asked.tokens} tokens, read once: {time.process_time() - began:.1f} s of a core\n")
    print("| structure | states | kinds of tokens | automaton, s | over tokens, s | first step, ms | other steps, ms |")
    print("|---|---|---|---|---|---|---|")
    for name, structure in _STRUCTURES.items():
        # Wall time, because a child process builds the automaton.
        began = time.monotonic()
        automaton = byte_automaton(*library_arguments(structure))
        automaton_s = time.monotonic() - began
        began = time.process_time()
        grammar = trie.grammar(*automaton)
        tokens_s = time.process_time() - began
        first_s, step_s = _step(grammar, asked.slots, asked.block)
        num_states, num_kinds = grammar.next_state.shape
        print(
            f"| {name} | {num_states} | {num_kinds} | {automaton_s:.2f} | {tokens_s:.2f} | {1000 * first_s:.1f} | "
            f"{1000 * step_s:.1f} |"
        )


if __name__ == "__main__":
    main()
