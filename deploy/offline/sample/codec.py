"""Tokenization of prompts for `d1 sample`. Special tokens in prompts are parsed as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.offline.policy import ReadyPolicy
from deploy.requests.base import is_valid_text
from deploy.requests.errors import TEMPLATE_ERRORS, template_error_text
from deploy.requests.families import AnyConfig
from deploy.requests.structured.structure import Structure
from learner.model.tokenizer import ChatTokenizer
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCodec:
    """Tokenization of prompts for a checkpoint."""

    policy: ReadyPolicy

    @property
    def config(self) -> AnyConfig:
        """Model config of the policy."""
        return self.policy.config

    def encode_prompt(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokenize a text prompt. Raises FieldError if the text is invalid."""
        tokenizer = self._tokenizer_for("prompt_ids", *([text] if text else []))
        return tokenizer.encode_text(text, add_special_tokens=adds_special)

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        _param: str = "messages",
        *,
        template: Mapping[str, Any] | None = None,
        adds_special: bool = False,
    ) -> list[int]:
        """Tokenize a conversation; `template` has chat template variables. Raises FieldError if it is invalid."""
        texts = [text for message in messages for text in message.values()]
        tokenizer = self._tokenizer_for("prompt_ids", *texts)
        try:
            return tokenizer.encode_chat(messages, template=template, add_special_tokens=adds_special)
        except TEMPLATE_ERRORS as error:
            what = template_error_text(error)
            raise FieldError("{prompt_ids} does not fit the chat template: {what}", what=what) from error

    def encode_text(self, text: str, param: str) -> list[int]:
        """Tokenize a text without added special tokens. Raises FieldError if it is invalid."""
        return self._tokenizer_for(param, *([text] if text else [])).encode_plain(text)

    def check_ids(self, ids: Sequence[int], _param: str) -> list[int]:
        """Return the ids. They are validated with the request, by `check_any_request`."""
        return list(ids)

    def grammar(self, structure: Structure) -> Grammar:
        """Compile a structure to a grammar. Raises FieldError if it is not supported or there is no tokenizer."""
        if self.policy.grammars is None:
            name = self.policy.name
            raise FieldError("{grammar} says what the text is, and {name} has no tokenizer: leave it out", name=name)
        return self.policy.grammars.of(structure)

    def _tokenizer_for(self, param: str, *texts: str) -> ChatTokenizer:
        """Return the tokenizer. Raises FieldError if there is none, or the texts are missing or invalid."""
        if self.policy.tokenizer is None:
            name = self.policy.name
            raise FieldError(f"{{{param}}} is text, and {{name}} has no tokenizer; give prompt_ids", name=name)
        if not texts:
            raise FieldError(f"{{{param}}} is empty; a completion needs something to complete")
        if not all(map(is_valid_text, texts)):
            raise FieldError(f"{{{param}}} has half of a surrogate pair or bytes that are not UTF-8, which is no text")
        return self.policy.tokenizer
