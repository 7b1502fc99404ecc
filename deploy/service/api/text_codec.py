"""Tokenization of a policy: texts and conversations to token ids, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from deploy.requests.codec import Codec
from deploy.requests.errors import TEMPLATE_ERRORS, template_error_text
from deploy.requests.families import read_config
from deploy.requests.stopping import BROKEN
from deploy.service.errors import ServiceError
from learner.model.checkpoint_files import open_tokenizer
from learner.model.config import TransformerConfig

MASKED = "\u2591"
"""Placeholder of a masked slot, in the text of a canvas."""
_MOST_BYTES = 4
"""Maximum bytes of a character."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """Tokens whose text ends inside a character."""

    tokens: Sequence[int] = ()
    text: str = ""
    slots: Sequence[int] = ()
    """For each character of the text, the slot that it begins in."""


class TextCodec(Codec):
    """Tokenizer of a policy, which all versions of a run share. Invalid input raises ServiceError.

    Prompts are from others than the operator: special tokens are parsed in text prompts only, and refused elsewhere.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Read the tokenizer and the model config of a checkpoint, but no weights."""
        self._tokenizer = open_tokenizer(checkpoint)
        super().__init__(checkpoint.name, read_config(checkpoint), self._tokenizer)
        self._special_ids = self._tokenizer.special_ids
        self._text_of: dict[int, str] = {}

    def encode_prompt(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokenize a text prompt. Special tokens in it are parsed as tokens."""
        return self.check_ids(self._tokenizer.encode_text(text, add_special_tokens=adds_special))

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        template: Mapping[str, Any] | None = None,
        adds_special: bool = False,
    ) -> list[int]:
        """Tokenize a conversation; `template` has variables of the chat template.

        Special tokens in the text of a turn are rejected.
        """
        for value in (template or {}).values():
            if isinstance(value, str):
                self.encode_text(value, "chat_template_kwargs")
        try:
            ids, framed = (
                self._tokenizer.encode_chat(turns, template=template, add_special_tokens=adds_special)
                for turns in (messages, [dict.fromkeys(turn, "x") | {"role": turn["role"]} for turn in messages])
            )
        except TEMPLATE_ERRORS as error:
            what = template_error_text(error)
            message = f"The chat template refuses this: {what}."
            raise ServiceError(400, message, "invalid_prompt", param="messages") from error
        # A special token in a user's text would end their turn and speak for others, or be denoised as a slot.
        self._refuse_special(self._count_special(ids) - self._count_special(framed), "messages")
        return ids

    def encode_text(self, text: str, param: str) -> list[int]:
        """Tokenize a text without special tokens, which are rejected."""
        ids = self._tokenizer.encode_plain(text)
        self._refuse_special(self._count_special(ids), param)
        return ids

    def encode_any(self, text: str, *, adds_special: bool = False) -> list[int]:
        """Tokenize a text, special tokens parsed."""
        return self._tokenizer.encode_text(text, add_special_tokens=adds_special)

    def decode_any(self, ids: Sequence[int]) -> str:
        """Decode ids, including special tokens."""
        return self._tokenizer.decode_all(ids)

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt, if they are valid."""
        config = self.config
        if any(not 0 <= token < config.vocab_size for token in ids):
            message = f"Token ids of this policy lie between 0 and {config.vocab_size - 1}."
            raise ServiceError(400, message, "invalid_prompt", param="prompt")
        if isinstance(config, TransformerConfig) and config.mask_token_id in ids:
            message = f"The prompt has the mask id {config.mask_token_id}; a prompt has no slots."
            raise ServiceError(400, message, "invalid_prompt", param="prompt")
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, without special tokens."""
        return self._tokenizer.decode(ids)

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""
        if token not in self._text_of:
            self._text_of[token] = self._tokenizer.tokens([token])[0]
        return self._text_of[token]

    def slot_texts(self, slots: Iterable[int | None], *, spells_special: bool = True) -> list[str]:
        """Return the part of the text that each slot adds; a masked slot (None) adds nothing.

        A character of several tokens belongs to the first of them. Special tokens are included with `spells_special`;
        without them, the texts of a complete canvas join to that of `decode`.
        """
        texts: list[str] = []
        begun = _Begun()
        for index, token in enumerate(slots):
            texts.append("")
            if token is None:
                begun = _Begun()
            elif token in self._special_ids:
                # `decode` skips it, even inside a character.
                texts[index] = self.token_text(token) if spells_special else ""
            else:
                begun = self._spelled(texts, begun, token)
        return texts

    def _spelled(self, texts: list[str], begun: _Begun, token: int) -> _Begun:
        """Add a token's text to its slot, the last one, and to the slot whose character it continues.

        Returns the tokens of a character that is then incomplete.
        """
        tokens = [*begun.tokens, token]
        text = self.decode(tokens) if begun.tokens else self.token_text(token)
        num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(begun.text, text, strict=False)))
        for slot in begun.slots[num_kept:]:
            texts[slot] = texts[slot][:-1]
        # With byte tokens (Gemma, Llama) an incomplete character decodes to one replacement character per token.
        slots = [*begun.slots[: num_kept + 1], *[len(texts) - 1] * len(text)][: len(text)]
        for slot, character in zip(slots[num_kept:], text[num_kept:], strict=True):
            texts[slot] += character
        if not text.endswith(BROKEN):
            return _Begun()
        num_over = len(self.decode(tokens[:1])) if len(tokens) > _MOST_BYTES else 0
        if num_over and self.decode(tokens[1:]) == text[num_over:]:
            return _Begun(tokens[1:], text[num_over:], slots[num_over:])
        return _Begun(tokens, text, slots)

    def _count_special(self, ids: Sequence[int]) -> Counter[int]:
        return Counter(token for token in ids if token in self._special_ids)

    def _refuse_special(self, spelled: Counter[int], param: str) -> None:
        if spelled:
            token = self._tokenizer.tokens([min(spelled)])[0]
            message = f"The prompt spells {token}, a special token of this policy."
            raise ServiceError(400, message, "invalid_prompt", param=param)
