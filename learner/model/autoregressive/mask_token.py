"""Choice of the mask token for an autoregressive tokenizer: its own, a reserved one, or a new one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NEW = "<|mask|>"
# Mask tokens that some tokenizers have without declaring them in their config.
_MASKS = (_NEW, "<|MASK|>", "<|mdm_mask|>", "[MASK]")
# `<|reserved_special_token_0|>` of Llama 3, and other vocabularies' names of unused rows.
_RESERVED = re.compile(r"[<\[]\|?(reserved|unused|extra|special)[\w ]*?\d+\|?[>\]]", re.IGNORECASE)
# Tokens of vocabularies for source code (StarCoder, SmolLM2), unused by a model that was not trained on notebooks. In
# SmolLM2-135M all these rows are equal, so they are untrained.
_OF_NOTEBOOKS = ("<empty_output>", "<jupyter_script>", "<jupyter_output>", "<jupyter_code>")


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskToken:
    """The mask token of a policy, and where its row of the embedding comes from."""

    token: str
    """The token's text."""
    id: int
    """The token's id."""
    is_new_row: bool
    """Whether a row is appended to the embedding for it."""


def choose_mask_token(tokenizer: PreTrainedTokenizerFast, vocab_size: int, name: str | None) -> MaskToken:
    """Choose the mask token and set it as the tokenizer's `mask_token`.

    Without a name these are tried in turn: a mask token that the tokenizer has, a token with the name of a reserved
    one, a row of the embedding that has no token, and tokens of notebooks.

    Args:
        tokenizer: changed in place.
        vocab_size: rows of the embedding.
        name: a token of the vocabulary, or a new one. A new one takes a row without a token, or else appends a row.

    Raises:
        ValueError: no token is unused, or the named token already has another function.
    """
    if name is not None and not name.strip():
        raise ValueError("--mask-token is blank; name a token of the vocabulary, or a new one such as <|mask|>")
    vocabulary = tokenizer.get_vocab()
    has_spare_row = max(vocabulary.values()) + 1 < vocab_size
    chosen = name or _unused_token(tokenizer, _NEW if has_spare_row else None)
    if chosen is None:
        raise ValueError(
            f"the tokenizer has no token to spare for the mask among its {len(vocabulary)}; pass --mask-token NEW to "
            "append a row"
        )
    if chosen in _tokens_in_use(tokenizer):
        raise ValueError(
            f"--mask-token {chosen}: it has a meaning of its own in this tokenizer; name another, or a new one"
        )
    tokenizer.add_special_tokens({"mask_token": chosen})
    index = tokenizer.get_vocab()[chosen]
    return MaskToken(token=chosen, id=index, is_new_row=index >= vocab_size)


def _unused_token(tokenizer: PreTrainedTokenizerFast, new: str | None) -> str | None:
    if tokenizer.mask_token is not None:
        return str(tokenizer.mask_token)
    vocabulary, in_use = tokenizer.get_vocab(), _tokens_in_use(tokenizer)
    candidates = [*(token for token in _MASKS if token in vocabulary), *_reserved(tokenizer)]
    candidates += [] if new is None else [new]
    candidates += [token for token in _OF_NOTEBOOKS if token in vocabulary]
    return next((token for token in candidates if token not in in_use), None)


def _reserved(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield the special tokens with names of reserved ones, in the order of their ids."""
    for _, added in sorted(tokenizer.added_tokens_decoder.items()):
        if added.special and _RESERVED.fullmatch(added.content):
            yield added.content


def _tokens_in_use(tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the tokens in use: those that begin, end, pad or structure a text."""
    named = {str(token) for name, token in tokenizer.special_tokens_map.items() if name != "mask_token"}
    template = str(tokenizer.chat_template or "")
    return named | {added.content for added in tokenizer.added_tokens_decoder.values() if added.content in template}
