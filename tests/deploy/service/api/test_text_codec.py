"""Text codec: the text of each token, slot by slot."""

import random
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models

TEXT = "5 😀é\n한 <answer>👩‍🚀</answer>"


def test_a_character_of_several_tokens_belongs_to_the_first(codec):
    ids = codec.encode_any("5 😀é!")
    assert codec.slot_texts(ids) == ["5", " ", "😀", "", "", "", "é", "", "!"]
    assert codec.slot_texts([*ids[:3], None, *ids[4:]]) == ["5", " ", "�", "", "�", "�", "é", "", "!"]
    assert codec.slot_texts([*ids[:5], codec.config.eos_token_id, *ids[5:]])[2:7] == ["😀", "", "", "<|endoftext|>", ""]


def test_slot_texts_join_to_the_decoded_text(codec):
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
    """Return, for each token, the characters by which the decoded text grows with it."""
    whole = codec.decode(ids)
    ends = [len(codec.decode(ids[:count])) for count in range(len(ids) + 1)]
    return [whole[begin:end] for begin, end in pairwise(ends)]


class ByteTokens:
    """Byte-level tokenizer like Gemma's and Llama's: no byte of an incomplete character joins another."""

    STAR = 257
    """A token that is no byte."""

    def __init__(self):
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "*": self.STAR}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
        self._tokenizer.decoder = decoders.ByteFallback()

    def decode(self, ids):
        return self._tokenizer.decode(list(ids))

    def tokens(self, ids):
        return [self.decode([token]) for token in ids]


@pytest.mark.parametrize(
    ("written", "texts"),
    [
        ("5é好😀!", ["5", "é", "", "好", "", "", "😀", "", "", "", "!"]),
        (b"\xf0\x9f\x98", ["�", "�", "�"]),
        ([0xF0, 0x9F, 0x98, ByteTokens.STAR, *"é".encode()], ["�", "�", "�", "*", "é", ""]),
    ],
    ids=["whole", "begun", "broken off"],
)
def test_byte_tokens_join_to_their_character(codec, monkeypatch, written, texts):
    monkeypatch.setattr(codec, "_tokenizer", ByteTokens())
    monkeypatch.setattr(codec, "_text_of", {})
    monkeypatch.setattr(codec, "_special_ids", frozenset())
    ids = written.encode() if isinstance(written, str) else written
    assert codec.slot_texts(list(ids)) == texts
