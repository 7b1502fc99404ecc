"""Conversion of an autoregressive checkpoint: same tensors, bidirectional attention, a mask token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from learner.model.autoregressive.mask_token import MaskToken, choose_mask_token
from learner.model.autoregressive.source import AutoregressiveCheckpoint, stop_token_ids
from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.deferred import torch
from learner.model.families import FAMILIES, read_config
from learner.model.families.raw_config import RawConfig
from learner.model.networks import make_meta_model
from learner.model.storage.throughput import ReportProgress
from learner.model.storage.weights import StoredWeights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

# Tokens that end a turn or a text in Llama's, Qwen's and SmolLM2's vocabularies. Configs of base models name only one.
_STOP_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
_VOCABULARY = ("embed.weight", "head.weight")


def convert_checkpoint(
    source: AutoregressiveCheckpoint,
    directory: Path,
    *,
    block_length: int | None = None,
    predicts_next: bool = False,
    mask_token: str | None = None,
    report: ReportProgress | None = None,
) -> MaskToken:
    """Write a source atomically as a policy that `load_policy` reads, and return the chosen mask token.

    Unless the embedding grows, safetensors weights are not rewritten: files of a directory are referred to in place,
    those of the hub's cache are linked or copied. Weights of a GGUF file are written in float32.

    Args:
        source: an autoregressive checkpoint.
        directory: where the policy is written; an existing checkpoint there is replaced.
        block_length: slots of a block of a block-causal policy; None: every slot sees every other.
        predicts_next: whether the output at a slot still predicts the next one, as the source's does.
        mask_token: a token of the vocabulary or a new one; None: see `choose_mask_token`.
        report: receives progress messages with the rate of reading and hashing.

    Raises:
        ValueError: the source has settings that d1 does not compute, no tokenizer, or no unused token for the mask.
        OSError: the policy cannot be written.
    """
    tokenizer, raw = source.tokenizer(), source.config()
    _check_vocabulary(source, tokenizer, raw["vocab_size"])
    mask = choose_mask_token(tokenizer, raw["vocab_size"], mask_token)
    own = {
        "model_type": f"a2d-{source.architecture}",
        "mask_token_id": mask.id,
        "block_size": block_length,
        "right_shift_logits": predicts_next,
        "eos_token_id": _stop_token_ids(raw, tokenizer),
        "vocab_size": raw["vocab_size"] + mask.is_new_row,
    }
    config = read_config(RawConfig(raw.path, {**raw.values, **own}))
    with TemporaryDirectory(prefix="d1-") as scratch:
        tokenizer.save_pretrained(scratch)
        weights = _weights(source, config, mask)
        save_checkpoint(directory, config, weights, Path(scratch), link_own_files=source.is_fetched, report=report)
    return mask


def _check_vocabulary(source: AutoregressiveCheckpoint, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {source.name} has {len(tokenizer)} tokens, and its model embeds {vocab_size}; one of "
            "them is of another checkpoint"
        )


def _stop_token_ids(raw: RawConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Collect the ids that end a text. The tokenizer's own comes first: SFT fills a canvas with it."""
    vocabulary = tokenizer.get_vocab()
    named = [vocabulary[token] for token in _STOP_TOKENS if token in vocabulary]
    return list(dict.fromkeys([*stop_token_ids(raw, tokenizer), *named]))


def _weights(
    source: AutoregressiveCheckpoint, config: TransformerConfig, mask: MaskToken
) -> StoredWeights | Mapping[str, Tensor]:
    if source.gguf_file is not None:
        state, family = source.load_model().state_dict(), FAMILIES[config.family]
        names = [name for name, _ in make_meta_model(config).named_parameters()]
        found: Mapping[str, Tensor] = {name: state[family.checkpoint_name(name)] for name in names}
        return {name: _with_row(name, tensor) for name, tensor in found.items()} if mask.is_new_row else found
    if not mask.is_new_row:
        return StoredWeights(source.directory, config)
    return _ExtendedVocabulary(
        StoredWeights(source.directory, config.model_copy(update={"vocab_size": config.vocab_size - 1}))
    )


class _ExtendedVocabulary(Mapping[str, "Tensor"]):
    """Stored weights with one more vocabulary row. Each tensor is read on access and not cached."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        return _with_row(name, self._stored[name][slice(None)].to(self._stored.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _with_row(name: str, tensor: Tensor) -> Tensor:
    """Append the mean row to a matrix of the vocabulary; return any other tensor unchanged."""
    if name not in _VOCABULARY:
        return tensor
    return torch.cat([tensor, tensor.float().mean(0, keepdim=True).to(tensor.dtype)])
