from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from learner.model.tokenizer import EOS, SPECIAL_TOKENS, ChatTokenizer, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(["solve 3 7 19 = 24", "<answer>3*7</answer>"] * 5, directory, 320)
    return ChatTokenizer(directory)


def test_digits_and_tags_are_single_tokens(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.tokens(tokenizer.encode_completion("<answer>19</answer>")) == ["<answer>", "1", "9", "</answer>"]


def test_a_conversation_ends_where_the_assistant_begins(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": " 3 7 "}])
    assert tokenizer.tokens(ids) == ["<|user|>", "3", " ", "7", "<|assistant|>"]


def test_special_tokens_have_the_first_ids(tokenizer: ChatTokenizer) -> None:
    assert [tokenizer.token_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert tokenizer.eos_id == tokenizer.token_id(EOS)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))
    assert tokenizer.decode(tokenizer.encode_completion(text)) == text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        ChatTokenizer(tmp_path)
