"""Config of a policy without a mask token (DiffusionGemma), read without importing torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.model.families.ids import read_list
from learner.model.families.raw_config import CONFIG, GENERATION_CONFIG, read_object

MODEL_TYPE = "diffusion_gemma"
# Defaults of transformers' `DiffusionGemmaConfig` (5.11) for missing keys of a config.json.
_CANVAS_LENGTH = 256
_TEXT = {"vocab_size": 262_144, "max_position_embeddings": 131_072, "eos_token_id": 1, "pad_token_id": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class RenoisingConfig:
    """Shape and special ids of such a policy, as far as a sampler needs them."""

    vocab_size: int
    """V."""
    canvas_length: int
    """C: slots that are denoised together."""
    stop_ids: tuple[int, ...]
    """Ids that end a text."""
    pad_token_id: int
    """Fills a canvas after the end of a text."""
    max_sequence_length: int
    """Maximum slots of prompt and completion together."""


def is_renoising(directory: Path) -> bool:
    """Whether a directory's config.json belongs to this family."""
    path = directory / CONFIG
    if not path.is_file():
        return False
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("model_type") == MODEL_TYPE


def read_renoising_config(directory: Path) -> RenoisingConfig:
    """Read the config of a checkpoint directory of this family. Raises ValueError if its files are invalid."""
    raw, said = _object(directory / CONFIG), _object(directory / GENERATION_CONFIG)
    text = {**_TEXT, **_mapping(raw.get("text_config"))}
    sizes = raw.get("canvas_length", _CANVAS_LENGTH), text["vocab_size"], text["max_position_embeddings"]
    if not all(type(number) is int for number in sizes):
        raise ValueError(
            f"{directory / CONFIG} makes no policy: canvas_length, vocab_size and max_position_embeddings should be "
            "whole numbers"
        )
    stated = ((directory / GENERATION_CONFIG, said), (directory / CONFIG, text))
    ends = _first_ids(stated, "eos_token_id", sizes[1])
    padding = _first_ids(stated, "pad_token_id", sizes[1], may_be_none=True)
    if not ends:
        raise ValueError(f"{directory / CONFIG} has no eos_token_id")
    return RenoisingConfig(
        vocab_size=sizes[1],
        canvas_length=sizes[0],
        stop_ids=tuple(ends),
        pad_token_id=padding[0] if padding else ends[0],
        max_sequence_length=sizes[2],
    )


def _first_ids(
    stated: Sequence[tuple[Path, Mapping[str, Any]]], key: str, vocab_size: int, *, may_be_none: bool = False
) -> list[int]:
    """Return the ids of the first file that states any; empty if none does. Raises ValueError as `read_list`."""
    lists = (read_list(path, key, values.get(key), vocab_size, may_be_none=may_be_none) for path, values in stated)
    return next(filter(None, lists), [])


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
