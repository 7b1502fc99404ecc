"""Special token ids of a checkpoint, for all families: mask, end of text, padding.

A key of a published config may hold one id, a list of ids or null, or be missing. `generation_config.json` may list
further ids that end a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.model.families.raw_config import GENERATION_CONFIG, RawConfig

_MASK, _EOS, _PAD = "mask_token_id", "eos_token_id", "pad_token_id"
# LLaMA's configs have this value for no padding.
_NO_PAD = -1


def read_ids(
    raw: RawConfig,
    vocab_size: int,
    *,
    mask_token: str | tuple[str, ...] | None = None,
    padding_is_stop: bool = False,
) -> dict[str, Any]:
    """Read the four fields of `TransformerConfig` that hold ids.

    The first id that ends a text becomes `eos_token_id`. Without a padding id it pads as well: attention never sees it.

    Args:
        raw: the config.
        vocab_size: rows of the embedding.
        mask_token: possible names of the mask token in the tokenizer, for a family whose configs may lack its id.
        padding_is_stop: whether the padding id ends a text if the config has no `eos_token_id`.

    Raises:
        ValueError: there is no mask id or no id that ends a text, or a value is not an id of the vocabulary.
    """
    padding = read_list(raw.path, _PAD, raw.get(_PAD), vocab_size, may_be_none=True)
    ends = read_list(raw.path, _EOS, raw.get(_EOS), vocab_size) or (padding if padding_is_stop else [])
    ends += read_list(raw.path.with_name(GENERATION_CONFIG), _EOS, raw.generation.get(_EOS), vocab_size)
    if not ends:
        raise ValueError(f"{raw.path} has no {_EOS}")
    names = (mask_token,) if isinstance(mask_token, str) else mask_token
    mask = raw[_MASK] if names is None else raw.mask_token_id(names)
    if type(mask) is not int:
        raise ValueError(f"{raw.path} has {_MASK} = {mask!r}; it should be an id")
    eos, *others = dict.fromkeys(ends)
    return {
        _MASK: mask,
        _EOS: eos,
        "other_stop_ids": tuple(others),
        _PAD: padding[0] if padding else eos,
    }


def read_list(path: Path, key: str, value: Any, vocab_size: int, *, may_be_none: bool = False) -> list[int]:
    """Convert a value (one id, a list of ids, or None) to a list of ids. Raises ValueError for anything else."""
    if value is None or (may_be_none and value == _NO_PAD):
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in ids):
        raise ValueError(f"{path} has {key} = {value!r}; it should be an id or a list of ids")
    for one in ids:
        if not 0 <= one < vocab_size:
            raise ValueError(f"{path} has {key} = {value!r}; {one} is no id of a vocabulary of {vocab_size}")
    return list(ids)
