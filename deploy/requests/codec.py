"""Tokenization of requests for one policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.requests.base import is_valid_text
from deploy.requests.errors import TEMPLATE_ERRORS, template_error_text
from deploy.requests.families import AnyConfig
from deploy.requests.structured.grammars import Grammars
from deploy.requests.structured.structure import Structure
from learner.model.tokenizer import ChatTokenizer
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar


class Codec:
    """Tokenizer and model config of a policy. Special tokens in prompts are parsed; invalid input raises FieldError."""

    def __init__(self, name: str, config: AnyConfig, tokenizer: ChatTokenizer | None) -> None:
        """Tokenize for the policy `name`. Without a tokenizer it takes token ids only."""
        self.config, self._name, self._maybe_tokenizer = config, name, tokenizer
        self._grammars = None if tokenizer is None else Grammars(tokenizer, config.vocab_size)

    def encode_prompt(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokenize a text prompt, optionally with the special tokens that the tokenizer adds."""
        tokenizer = self._tokenizer_for("prompt_ids", *([text] if text else []))
        return tokenizer.encode_text(text, add_special_tokens=adds_special)

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        template: Mapping[str, Any] | None = None,
        adds_special: bool = False,
    ) -> list[int]:
        """Tokenize a conversation; `template` has variables of the chat template."""
        tokenizer = self._tokenizer_for("prompt_ids", *(text for message in messages for text in message.values()))
        try:
            return tokenizer.encode_chat(messages, template=template, add_special_tokens=adds_special)
        except TEMPLATE_ERRORS as error:
            what = template_error_text(error)
            raise FieldError("{prompt_ids} does not fit the chat template: {what}", what=what) from error

    def encode_text(self, text: str, param: str) -> list[int]:
        """Tokenize the text in the field `param` without added special tokens."""
        return self._tokenizer_for(param, *([text] if text else [])).encode_plain(text)

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt. They are validated with the request, by `check_any_request`."""
        return list(ids)

    def has_grammar(self, structure: Structure) -> bool:
        """Return whether the grammar is cached."""
        return self._grammars is not None and self._grammars.has(structure)

    def grammar(self, structure: Structure) -> Grammar:
        """Compile a structure to a grammar over the policy's tokens."""
        if self._grammars is None:
            raise FieldError(
                "{grammar} says what the text is, and {name} has no tokenizer: leave it out", name=self._name
            )
        return self._grammars.of(structure)

    def _tokenizer_for(self, param: str, *texts: str) -> ChatTokenizer:
        """Return the tokenizer. Raises FieldError if there is none, or the texts are missing or invalid."""
        if self._maybe_tokenizer is None:
            raise FieldError(f"{{{param}}} is text, and {{name}} has no tokenizer; give prompt_ids", name=self._name)
        if not texts:
            raise FieldError(f"{{{param}}} is empty; a completion needs something to complete")
        if not all(map(is_valid_text, texts)):
            raise FieldError(f"{{{param}}} has half of a surrogate pair or bytes that are not UTF-8, which is no text")
        return self._maybe_tokenizer
