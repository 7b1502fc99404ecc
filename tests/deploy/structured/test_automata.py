"""Automata of schemas and regexes: over bytes as Python's `re`, and over tokens as over bytes."""

import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.requests.structured import byte_automaton as module
from deploy.requests.structured.byte_automaton import AutomatonError, byte_automaton
from deploy.requests.structured.structure import Structure
from rollout.grammar.grammar import NOWHERE
from rollout.grammar.token_automaton import TokenTrie


def accepts(next_state: NDArray[Any], accepting: NDArray[np.bool_], text: Sequence[int]) -> bool:
    state = 0
    for unit in text:
        state = int(next_state[state, unit])
        if state == NOWHERE:
            return False
    return bool(accepting[state])


LETTERS = ("ab", "abcd", "aAbBé😀\n")


@pytest.mark.parametrize(
    "expression", ["a|bc*", "(ab|a)(c|bcd)", "[^a]{0,3}", ".{1,4}", "(?i)ab?", "(a|b)*a(a|b){3}", ""]
)
def test_expressions_match_like_python(expression: str) -> None:
    automaton = byte_automaton("regex", expression)
    draw = random.Random(expression)
    texts = ["", *("".join(draw.choices(draw.choice(LETTERS), k=draw.randint(1, 6))) for _ in range(600))]
    matches = [re.fullmatch(expression, text) is not None for text in texts]
    assert [accepts(*automaton, text.encode()) for text in texts] == matches
    assert 0 < sum(matches) < len(texts)


def test_character_classes_are_ascii() -> None:
    """As in most libraries. In the library used here they cover all of Unicode."""
    automaton = byte_automaton("regex", r"\d[\w-]\s\\d")
    assert accepts(*automaton, rb"1_ \d")
    assert accepts(*automaton, b"9-\n\\d")
    assert not any(accepts(*automaton, text.encode()) for text in ("٣a \\d", "1é \\d", "1a\u00a0\\d", "1a 1", r"1\ \d"))


def test_counted_wildcards_do_not_multiply_states() -> None:
    """By default the library makes an unanchored automaton. For one of these it has 2 ** 30 states."""
    for kind, text in (
        ("regex", ".{0,30}"),
        ("regex", "[^,]{1,40}"),
        ("schema", json.dumps({"type": "string", "maxLength": 64})),
        ("schema", json.dumps({"type": "object"})),
    ):
        assert len(byte_automaton(kind, text)[1]) < 2000


def test_choices_are_literal() -> None:
    choices = ["a.b", "(", "x|y", "é {2}", "[^-]&#~"]
    structure = Structure.of_choices(choices, "structured_outputs")
    automaton = byte_automaton(structure.kind, structure.text)
    assert all(accepts(*automaton, choice.encode()) for choice in choices)
    assert not any(accepts(*automaton, text.encode()) for text in ("acb", "x", "y", "a.b(", ""))


@pytest.mark.parametrize("expression", ["(", "a)|(b", "[a", "^a$", "a$", r"\bword", "(?!a)b", r"(a)\1", "a{3"])
def test_invalid_expressions_are_refused(expression: str) -> None:
    with pytest.raises(AutomatonError, match="it is invalid, or has an anchor, a word boundary, a lookaround"):
        byte_automaton("regex", expression)


@pytest.mark.parametrize("expression", ["[a[b]]", "[^a&&b]", "[a-c--b]", "[a~~b]", "x[[:alpha:]]"])
def test_classes_that_libraries_read_differently_are_refused(expression: str) -> None:
    with pytest.raises(AutomatonError, match="in a class, which libraries read differently"):
        byte_automaton("regex", expression)


def test_class_operators_outside_classes_are_literal() -> None:
    automaton = byte_automaton("regex", r"[]a\[-]&&--[^]\]]~~")
    assert accepts(*automaton, b"]&&--x~~")
    assert accepts(*automaton, b"[&&--a~~")
    assert not accepts(*automaton, b"b&&--a~~")


def test_a_pattern_that_closes_its_group_is_refused() -> None:
    for pattern in ("(a)|(b)", "(a))"):
        with pytest.raises(AutomatonError, match="it is invalid"):
            byte_automaton("schema", json.dumps({"type": "string", "pattern": pattern}))


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(AutomatonError, match="is not served"):
        byte_automaton("schema", json.dumps({"enum": ["\ud800"]}))


def test_too_large_automata_are_refused_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AutomatonError, match="has an automaton of 6001 states; 2048 are the most"):
        byte_automaton("regex", "a{2000}{3}")
    with pytest.raises(AutomatonError, match="has 65537 characters; 65536 are the most"):
        byte_automaton("regex", "a" * 65537)
    # Twenty characters, a million states: the compiling process has resource limits.
    began = time.monotonic()
    with pytest.raises(AutomatonError, match="building its automaton takes more than 5 s or 1 GiB"):
        byte_automaton("regex", "(a{1000}){1000}{9}")
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.01)
    with pytest.raises(AutomatonError, match="its automaton takes more than"):
        byte_automaton("regex", "a")
    assert time.monotonic() - began < 120


@pytest.mark.parametrize("pattern", [".", "[^a]", 'a"', r"\\", r"\s", "[ -~]"])
def test_a_pattern_that_can_match_a_quote_is_refused(pattern: str) -> None:
    with pytest.raises(AutomatonError, match="which quotes, backslashes or control characters match"):
        byte_automaton("schema", json.dumps({"type": "array", "items": {"type": "string", "pattern": f"({pattern})"}}))


@pytest.mark.parametrize("expression", ["(ab|a)(c|bcd)*", "[a-c]{2,5}", "é+|😀", ".*"])
def test_token_transitions_equal_those_of_their_bytes(expression: str) -> None:
    draw = random.Random(expression)
    spelled: list[bytes | None] = [None, *(bytes([byte]) for byte in range(256))]
    spelled += ["".join(draw.choices(draw.choice(("abcd", "é")), k=draw.randint(1, 3))).encode() for _ in range(100)]
    # A part of a character, and the ends and beginnings of others.
    spelled += ["é".encode()[1:] + b"a", "😀".encode()[:3], "😀".encode()[3:], None]
    automaton = byte_automaton("regex", expression)
    grammar = TokenTrie(spelled, len(spelled) + 2).grammar(*automaton)
    found = set()
    for _ in range(3000):
        tokens = draw.choices(draw.choice((range(257), range(257, len(spelled)))), k=draw.randint(0, 3))
        text = (
            None
            if any(spelled[token] is None for token in tokens)
            else b"".join(spelled[token] or b"" for token in tokens)
        )
        classes = [int(grammar.class_of[token]) for token in tokens]
        is_text = text is not None and accepts(*automaton, text)
        assert accepts(grammar.next_state, grammar.accepting, classes) == is_text
        found.add(is_text)
    assert found == {True, False}
    # Ids whose tokens have no text, and ids without a token.
    nothing = grammar.class_of[[0, len(spelled) - 1, len(spelled), len(spelled) + 1]]
    assert (grammar.next_state[:, nothing] == NOWHERE).all()


def test_transitions_are_right_across_chunks_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton = byte_automaton("regex", "(abc|ab){2,20}")
    spelled: list[bytes | None] = [b"a", b"b", b"c", b"ab", b"bc", b"cab"]
    at_once = TokenTrie(spelled, 6).grammar(*automaton)
    monkeypatch.setattr("rollout.grammar.token_automaton._STATES_AT_ONCE", 7)
    apart = TokenTrie(spelled, 6).grammar(*automaton)
    assert at_once.next_state[:, at_once.class_of].tolist() == apart.next_state[:, apart.class_of].tolist()


def test_too_many_token_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.grammar.token_automaton.MAX_ENTRIES", 10)
    with pytest.raises(ValueError, match=r"leads \d+ kinds of tokens through \d+ states, which is too many"):
        TokenTrie([b"a", b"b"], 2).grammar(*byte_automaton("regex", "a{9}b"))
