"""Tokens as text, slot by slot."""

import random
from itertools import pairwise

TEXT = "5 😀é\n한 <answer>👩‍🚀</answer>"


def test_a_character_of_several_tokens_is_in_the_first_of_them(codec):
    ids = codec.encode_any("5 😀é!")
    assert codec.slot_texts(ids) == ["5", " ", "😀", "", "", "", "é", "", "!"]
    assert codec.slot_texts([*ids[:3], None, *ids[4:]]) == ["5", " ", "�", "", "�", "�", "é", "", "!"]
    assert codec.slot_texts([*ids[:5], codec.config.eos_token_id, *ids[5:]])[2:7] == ["😀", "", "", "<|endoftext|>", ""]


def test_the_texts_of_all_slots_are_the_text(codec):
    draw = random.Random(0)
    pieces = codec.encode_any(TEXT)
    specials = codec._special_ids
    for _ in range(300):
        pool = draw.choice([pieces, range(codec.config.vocab_size)])
        ids = [draw.choice(pool) for _ in range(24)] if draw.random() < 0.7 else pieces
        texts = codec.slot_texts(ids)
        kept = [(token, text) for token, text in zip(ids, texts, strict=True) if token not in specials]
        assert [text for _, text in kept] == _slow_texts(codec, [token for token, _ in kept])
        assert all(text == codec.token_text(token) for token, text in zip(ids, texts, strict=True) if token in specials)


def _slow_texts(codec, ids):
    """Each token has the characters that begin in it: as many as the text is longer with it."""
    whole = codec.decode(ids)
    ends = [len(codec.decode(ids[:count])) for count in range(len(ids) + 1)]
    return [whole[begin:end] for begin, end in pairwise(ends)]
