"""Choice of the mask token for an autoregressive checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.model.autoregressive.mask_token import choose_mask_token
from learner.model.tokenizer import load_tokenizer
from tests.learner.model.autoregressive.tiny_autoregressive import END, END_OF_TURN, RESERVED, TURN, write_tokenizer

ENDS = (END, TURN, END_OF_TURN)
CODE = ("<repo_name>", "<file_sep>", "<jupyter_script>", "<empty_output>")


def made(directory: Path, specials: Sequence[str]) -> Any:
    write_tokenizer(directory, specials)
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    ("specials", "spare_rows", "token", "index"),
    [
        # Reserved tokens take precedence over unused embedding rows, and those over tokens for notebooks.
        ((*ENDS, RESERVED), 8, RESERVED, 3),
        ((*ENDS, *CODE), 8, "<|mask|>", 300),
        ((*ENDS, *CODE), 0, "<empty_output>", 6),
        # An existing mask token takes precedence over all.
        ((*ENDS, RESERVED, "<|MASK|>"), 8, "<|MASK|>", 4),
    ],
)
def test_an_unused_token_becomes_the_mask(
    specials: Sequence[str], spare_rows: int, token: str, index: int, tmp_path: Path
) -> None:
    tokenizer = made(tmp_path, specials)
    mask = choose_mask_token(tokenizer, len(tokenizer) + spare_rows, None)
    assert (mask.token, mask.id, mask.is_new_row) == (token, index, False)
    assert tokenizer.mask_token == token
    assert tokenizer(f"a{token}b")["input_ids"].count(index) == 1
    assert tokenizer.added_tokens_decoder[index].special


def test_the_tokenizers_own_mask_token_is_used(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, (*ENDS, RESERVED, "<hole>"))
    tokenizer.mask_token = "<hole>"
    assert choose_mask_token(tokenizer, 300, None).token == "<hole>"


@pytest.mark.parametrize(
    ("name", "spare_rows", "index", "is_new_row"),
    [("<repo_name>", 0, 3, False), ("<|hole|>", 8, 300, False), ("<|hole|>", 0, 300, True)],
)
def test_a_named_token_is_used_or_added(
    name: str, spare_rows: int, index: int, is_new_row: bool, tmp_path: Path
) -> None:
    mask = choose_mask_token(made(tmp_path, (*ENDS, *CODE)), 300 + spare_rows, name)
    assert (mask.token, mask.id, mask.is_new_row) == (name, index, is_new_row)


@pytest.mark.parametrize("name", ["", " "])
def test_a_blank_token_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--mask-token is blank"):
        choose_mask_token(made(tmp_path, ENDS), 310, name)


@pytest.mark.parametrize("name", [None, TURN, END_OF_TURN])
def test_a_token_with_a_meaning_is_refused(name: str | None, tmp_path: Path) -> None:
    sentence = "no token to spare .* pass --mask-token NEW" if name is None else "has a meaning of its own"
    with pytest.raises(ValueError, match=sentence):
        choose_mask_token(made(tmp_path, (*ENDS, "<repo_name>")), 300, name)
