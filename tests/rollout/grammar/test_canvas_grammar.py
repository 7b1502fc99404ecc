"""Tokens that a grammar allows at each slot of a canvas, checked against all strings."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.grammar.canvas_grammar import CanvasGrammar, masked_canvas
from rollout.grammar.grammar import NOWHERE, Grammar

NUM_TOKENS = 5
END, OTHER_END, FORBIDDEN = 4, 3, 2


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    num_states, num_classes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    states = st.integers(NOWHERE, num_states - 1)
    rows = st.lists(
        st.lists(states, min_size=num_classes, max_size=num_classes), min_size=num_states, max_size=num_states
    )
    classes = st.lists(st.integers(0, num_classes - 1), min_size=NUM_TOKENS, max_size=NUM_TOKENS)
    accepting = st.lists(st.booleans(), min_size=num_states, max_size=num_states)
    return Grammar(
        class_of=np.array(draw(classes), dtype=np.int32),
        next_state=np.array(draw(rows), dtype=np.int16),
        accepting=np.array(draw(accepting), dtype=bool),
        most_tokens=draw(st.integers(0, 5)),
    )


def is_text(grammar: Grammar, tokens: tuple[int, ...]) -> bool:
    """Return whether a whole canvas is a text of the grammar, filled up with ends of text."""
    state, num_tokens = 0, 0
    while num_tokens < len(tokens) and tokens[num_tokens] not in (END, OTHER_END):
        if tokens[num_tokens] == FORBIDDEN:
            return False
        state = int(grammar.next_state[state, grammar.class_of[tokens[num_tokens]]])
        if state == NOWHERE:
            return False
        num_tokens += 1
    rest = tokens[num_tokens:]
    return bool(grammar.accepting[state]) and num_tokens <= grammar.most_tokens and set(rest) <= {END, OTHER_END}


def texts_of(grammar: Grammar, canvas: list[int | None]) -> list[tuple[int, ...]]:
    places = [range(NUM_TOKENS) if token is None else [token] for token in canvas]
    return [tokens for tokens in product(*places) if is_text(grammar, tokens)]


def update(grammar: Grammar, canvas: list[int | None]) -> CanvasGrammar:
    seen = CanvasGrammar(grammar, len(canvas), [END, OTHER_END], [FORBIDDEN], len(canvas))
    see(seen, canvas)
    return seen


def see(seen: CanvasGrammar, canvas: list[int | None]) -> None:
    seen.update(np.array([token or 0 for token in canvas]), np.array([token is None for token in canvas]))


def expect_all_that_texts_have(seen: CanvasGrammar, grammar: Grammar, canvas: list[int | None]) -> None:
    texts = texts_of(grammar, canvas)
    assert seen.is_possible == bool(texts)
    for slot, token in enumerate(canvas):
        if token is None:
            allowed = seen.allowed(slot)[seen.class_of_V].nonzero()[0].tolist()
            assert allowed == sorted({text[slot] for text in texts})


def test_canvases_of_one_grammar_have_separate_state() -> None:
    facts = {"class_of": np.arange(5, dtype=np.int32), "most_tokens": 9, "accepting": np.array([False, False, True])}
    moves = np.full((3, 5), NOWHERE, dtype=np.int16)
    moves[0, :2], moves[1, 0], moves[2, 1] = (1, 2), 2, 2
    grammar = Grammar(next_state=moves, **facts)
    first, second = (masked_canvas(grammar, 3, [END, OTHER_END], [FORBIDDEN], 3) for _ in range(2))
    see(first, [1, None, None])
    expect_all_that_texts_have(first, grammar, [1, None, None])
    expect_all_that_texts_have(second, grammar, [None] * 3)
    # An equal grammar in another object shares the table; other end tokens do not.
    again = masked_canvas(Grammar(next_state=moves.copy(), **facts), 3, [END, OTHER_END], [FORBIDDEN], 3)
    assert again.class_of_V is second.class_of_V
    assert masked_canvas(grammar, 3, [END], [FORBIDDEN], 3).class_of_V is not second.class_of_V


tokens_or_masks = st.lists(st.none() | st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=5)


@given(grammar=grammars(), canvas=tokens_or_masks)
@settings(max_examples=300)
def test_allowed_tokens_are_those_of_some_text(grammar: Grammar, canvas: list[int | None]) -> None:
    expect_all_that_texts_have(update(grammar, canvas), grammar, canvas)


@given(grammar=grammars(), length=st.integers(1, 5), data=st.data())
@settings(max_examples=200)
def test_commits_in_any_order_leave_a_possible_text(grammar: Grammar, length: int, data: st.DataObject) -> None:
    canvas: list[int | None] = [None] * length
    seen = update(grammar, canvas)
    while seen.is_possible and None in canvas:
        masked = [slot for slot, token in enumerate(canvas) if token is None]
        slots = data.draw(st.lists(st.sampled_from(masked), min_size=1, unique=True))
        allowed = {slot: seen.allowed(slot)[seen.class_of_V].nonzero()[0].tolist() for slot in slots}
        drawn = {slot: data.draw(st.sampled_from(tokens)) for slot, tokens in allowed.items()}
        fit = seen.fitting(drawn)
        for slot, token in sorted(drawn.items()):
            would_be = [*canvas]
            would_be[slot] = token
            assert (slot in fit) == bool(texts_of(grammar, would_be))
            canvas = would_be if slot in fit else canvas
        assert min(drawn) in fit
        see(seen, canvas)
        expect_all_that_texts_have(seen, grammar, canvas)
    # Returning to an earlier canvas must restore its allowed tokens.
    see(seen, [None] * length)
    expect_all_that_texts_have(seen, grammar, [None] * length)


@given(grammar=grammars())
@settings(max_examples=100)
def test_fewest_tokens_is_the_shortest_texts_length(grammar: Grammar) -> None:
    classes = range(grammar.next_state.shape[1])
    lengths = [length for length in range(5) for text in product(classes, repeat=length) if _accepts(grammar, text)]
    assert grammar.fewest_tokens == min(lengths, default=None)


def _accepts(grammar: Grammar, classes: tuple[int, ...]) -> bool:
    state = 0
    for of_class in classes:
        state = int(grammar.next_state[state, of_class])
        if state == NOWHERE:
            return False
    return bool(grammar.accepting[state])


@pytest.mark.parametrize("changed", ["class_of", "next_state", "accepting", "most_tokens"])
def test_different_grammars_have_different_digests(changed: str) -> None:
    facts = {
        "class_of": np.zeros(3, dtype=np.int32),
        "next_state": np.zeros((1, 2), dtype=np.int16),
        "accepting": np.ones(1, dtype=bool),
        "most_tokens": 3,
    }
    others = {
        "class_of": np.array([0, 1, 0], dtype=np.int32),
        "next_state": np.zeros((2, 1), dtype=np.int16),
        "accepting": np.zeros(1, dtype=bool),
        "most_tokens": 4,
    }
    assert Grammar(**facts).digest == Grammar(**facts).digest
    assert Grammar(**facts).digest != Grammar(**facts | {changed: others[changed]}).digest
