"""Tokenization of `d1 sample`: prompts are their author's own, special tokens and all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from deploy.requests.base import is_whole
from deploy.requests.refusals import template_refusal
from deploy.sampling.policy import ReadyPolicy
from learner.model.config import TransformerConfig
from learner.model.tokenizer import ChatTokenizer
from rollout.field_error import FieldError


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCodec:
    """How a checkpoint reads prompts."""

    policy: ReadyPolicy
    is_raw: bool
    """Whether a user's turn is taken as it is, without the chat template."""

    @property
    def config(self) -> TransformerConfig:
        """The shape of the policy."""
        return self.policy.config

    def encode_turn(self, text: str) -> list[int]:
        """The prompt of a user's turn. Raises FieldError."""
        if self.is_raw or not text:
            return self.encode_text(text, "prompt_ids")
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The prompt of a conversation. Raises FieldError."""
        texts = [text for message in messages for text in message.values()]
        tokenizer = self._tokenizer_for("prompt_ids", *texts)
        try:
            return tokenizer.encode_chat(messages)
        except (TemplateError, ValueError) as error:
            # Templates refuse what they do not know; a tokenizer may have none.
            what = template_refusal(error)
            raise FieldError("{prompt_ids} does not fit the chat template: {what}", what=what) from error

    def encode_text(self, text: str, param: str) -> list[int]:
        """The ids of a text by itself. Raises FieldError."""
        param = "prompt_ids" if param == "prompt" else param
        return self._tokenizer_for(param, *([text] if text else [])).encode_completion(text)

    def check_ids(self, ids: Sequence[int], _param: str) -> list[int]:
        """The ids; whoever checks the request looks at them."""
        return list(ids)

    def _tokenizer_for(self, param: str, *texts: str) -> ChatTokenizer:
        """The tokenizer, for texts that it can read. Raises FieldError."""
        if self.policy.tokenizer is None:
            name = self.policy.name
            raise FieldError(f"{{{param}}} is text, and {{name}} has no tokenizer; give prompt_ids", name=name)
        if not texts:
            raise FieldError(f"{{{param}}} is empty; a completion needs something to complete")
        if not all(map(is_whole, texts)):
            raise FieldError(f"{{{param}}} has half of a surrogate pair or bytes that are not UTF-8, which is no text")
        return self.policy.tokenizer
