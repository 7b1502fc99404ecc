"""Tokenizers: training of a small byte-level BPE, loading of a checkpoint's, and encoding of chats."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

MASK, EOS = "<|mdm_mask|>", "<|endoftext|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (MASK, EOS, USER, ASSISTANT)
# Files of a tokenizer in its two layouts: `tokenizer.json`, or `vocab.json` and `merges.txt`.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Tags around an answer and its reasoning: one token each, so that the tiny policy does not have to spell them.
TAGS = ("<answer>", "</answer>", "<reasoning>", "</reasoning>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(texts: Iterable[str], directory: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on `texts` and save it to `directory` as Hugging Face files.

    Digits are always single tokens, for arithmetic. Every byte is a token, so any text can be encoded and decoded back.
    The special tokens have the ids 0, 1, 2, ... in the order of `SPECIAL_TOKENS`.

    Args:
        texts: training texts of the merges.
        directory: where `tokenizer.json` and its config are written.
        vocab_size: maximum number of tokens; at least 256 bytes, the special tokens and the tags.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A piece is one digit, space, newline, sign or word. Merges never cross pieces.
            pre_tokenizers.Split(Regex(r"\d|\s|[^\w\s]|[^\W\d]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)


def _byte_of() -> dict[str, int]:
    """Build GPT-2's table of a byte-level BPE, from characters in tokens to bytes.

    Printable bytes are represented by themselves, the others by characters from 256 on.
    """
    visible = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_of()


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer files of a checkpoint directory, whatever class they name; no code in it is run.

    A byte-level BPE in two files, as in Dream's checkpoints, is read as Qwen2's, which it is derived from: it has the
    same merges and splits a text into the same words.

    Raises:
        ValueError: there is no tokenizer, or it is damaged.
    """
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    if (directory / "tokenizer.json").is_file():
        kind = PreTrainedTokenizerFast
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        kind = Qwen2Tokenizer
    else:
        raise ValueError(f"{directory} has no tokenizer.json, nor vocab.json and merges.txt")
    try:
        return kind.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        # The package tokenizers raises no more specific class.
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error


class ChatTokenizer:
    """Tokenizer of a checkpoint: encodes conversations as prompt ids, and decodes completion ids to text."""

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer of a checkpoint directory. Raises ValueError as `load_tokenizer`."""
        self._tokenizer: Any = load_tokenizer(directory)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        prefix: str = "",
        *,
        template: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Encode the prompt of a conversation (messages of `role` and `content`), up to the assistant's turn.

        With a `prefix`, which every answer is forced to begin with, it ends after that. `template` holds variables that
        the chat template defines.
        """
        return self.encode_text(
            self.chat_text(messages, template=template) + prefix, add_special_tokens=add_special_tokens
        )

    def chat_text(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the text of a conversation, special tokens included.

        With `add_generation_prompt` it ends with the header of the assistant's turn. `template` holds variables that
        the chat template defines. Raises ValueError for a variable with a reserved name.
        """
        variables = dict(template or {})
        if taken := sorted(self._reserved & variables.keys()):
            raise ValueError(f"{taken[0]} is no variable of the template's own")
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
        )
        return str(text)

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """Names that a chat template receives anyway, which its own variables may not have."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({"messages", *parameters, *self._tokenizer.special_tokens_map})

    @property
    def chat_template(self) -> str:
        """Source text of the chat template; empty if there is none."""
        return str(self._tokenizer.chat_template or "")

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text without adding special tokens around it."""
        return self.encode_text(text, add_special_tokens=False)

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text, special tokens in it included; `add_special_tokens` adds those around a text (BOS, EOS)."""
        # Not verbose: it would warn of texts longer than the policy's canvas, which are truncated elsewhere.
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the text of a completion, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decode ids to text, with special tokens."""
        return str(self._tokenizer.decode(list(ids)))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Decode each id separately, for display."""
        return [str(self._tokenizer.decode([token])) for token in ids]

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id's token; None for special tokens and for ids without a token.

        Raises ValueError if the tokenizer is not byte-level.
        """
        from tokenizers.decoders import ByteLevel

        if not isinstance(self._tokenizer.backend_tokenizer.decoder, ByteLevel):
            raise ValueError("needs a tokenizer of bytes, as LLaDA's and Dream's are, and this policy's is another")
        vocabulary, added = self._tokenizer.get_vocab(), self._tokenizer.added_tokens_decoder
        spelled: list[bytes | None] = [None] * (1 + max(vocabulary.values()))
        for token, index in vocabulary.items():
            if index not in added:
                spelled[index] = bytes(_BYTE_OF[character] for character in token)
            elif not added[index].special:
                spelled[index] = added[index].content.encode()
        return spelled

    def token_id(self, token: str) -> int:
        """Return the id of a special token."""
        return int(self._tokenizer.convert_tokens_to_ids(token))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens (turns, ends, masks), which no text of a user may contain."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token for token, facts in added.items() if facts.special)

    @property
    def eos_id(self) -> int:
        """Id of end of text."""
        return int(self._tokenizer.eos_token_id)
