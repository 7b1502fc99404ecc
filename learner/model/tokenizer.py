"""Tokenizers: the small one that a recipe trained from scratch makes, and any checkpoint's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

MASK, EOS = "<|mdm_mask|>", "<|endoftext|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (MASK, EOS, USER, ASSISTANT)
# What tokenizers are made of, in their two layouts: `tokenizer.json`, or `vocab.json` and `merges.txt`.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Tags that frame an answer: one token each, so that the tiny policy does not spell them.
TAGS = ("<answer>", "</answer>", "<reasoning>", "</reasoning>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(texts: Iterable[str], directory: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on `texts` and save it to `directory` as Hugging Face files.

    Digits are always single tokens (arithmetic needs them), every byte is a token, so any text can be encoded and
    decodes back. The special tokens have the ids 0, 1, 2, ... in the order of `SPECIAL_TOKENS`.

    Args:
        texts: what the merges are learned from.
        directory: where `tokenizer.json` and its config are written.
        vocab_size: at most this many tokens; 256 bytes, the special tokens and the tags are the least.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # One digit, one space or newline, one sign, or one word: merges never cross these.
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
    """The byte that each character of a byte-level BPE's tokens stands for (GPT-2's table): those that can be seen for
    themselves, the others for characters from 256 on."""
    visible = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_of()


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer files of a checkpoint directory, whatever class they name; code beside them is not run.

    A byte-level BPE in two files, as Dream's checkpoints have it, is read as Qwen2's, from which it comes: the same
    merges, the same split of a text into words.

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
        # The package tokenizers raises nothing more special.
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error


class ChatTokenizer:
    """Conversations to prompt ids, completion ids to text."""

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
        adds_special: bool = False,
    ) -> list[int]:
        """The prompt of a conversation (`role`, `content` each), ending where the assistant's turn begins.

        With a `prefix` it ends after that: what every answer is made to begin with. `template` are variables of the
        chat template's own.
        """
        return self.encode_text(self.chat_text(messages, template=template) + prefix, adds_special=adds_special)

    def chat_text(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, special tokens spelled; with the beginning of an answer if asked to.

        Raises ValueError for a variable that has a meaning of its own.
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
        """What a chat template is called with besides."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({"messages", *parameters, *self._tokenizer.special_tokens_map})

    @property
    def chat_template(self) -> str:
        """The template's own text; empty where there is none."""
        return str(self._tokenizer.chat_template or "")

    def encode_completion(self, text: str) -> list[int]:
        """The ids of a completion that we wrote ourselves, tags as tokens."""
        return self.encode_text(text, adds_special=False)

    def encode_text(self, text: str, *, adds_special: bool) -> list[int]:
        """The ids of a text, special tokens as tokens; with what the tokenizer puts around every text if asked to."""
        # Not verbose: it would warn of texts that are longer than the policy's canvas, which are cut elsewhere.
        return list(self._tokenizer(text, add_special_tokens=adds_special, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_all(self, ids: Sequence[int]) -> str:
        """The same with special tokens spelled."""
        return str(self._tokenizer.decode(list(ids)))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """One string for each id, to show them."""
        return [str(self._tokenizer.decode([token])) for token in ids]

    def token_bytes(self) -> list[bytes | None]:
        """What each id spells, in bytes; None of special tokens, which spell nothing, and of ids without a token.

        Raises ValueError for a tokenizer whose tokens are no bytes.
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
        """The id of a special token."""
        return int(self._tokenizer.convert_tokens_to_ids(token))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that no text of a user may spell: turns, ends, masks."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token for token, facts in added.items() if facts.special)

    @property
    def eos_id(self) -> int:
        """The id of end of text."""
        return int(self._tokenizer.eos_token_id)
