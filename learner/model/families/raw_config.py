"""Raw keys of a checkpoint's `config.json`, with errors that name the file and the key.

Some families keep the mask id in the tokenizer's files, or end-of-text ids in `generation_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# The files that a policy's config is read from.
CONFIG_FILES = (CONFIG, GENERATION_CONFIG, _TOKENIZER_CONFIG)


@dataclass(frozen=True, slots=True)
class RawConfig:
    """The keys of one `config.json`, under the family's names."""

    path: Path
    """The file, for error messages."""
    values: Mapping[str, Any]
    """Its keys and values."""

    @classmethod
    def read(cls, directory: Path) -> RawConfig:
        """Read the config of a checkpoint directory. Raises ValueError if there is none, or it is not a JSON object."""
        path = directory / CONFIG
        if not path.is_file():
            raise ValueError(f"{directory} is not a checkpoint: it has no {CONFIG}")
        return cls(path, read_object(path))

    def __getitem__(self, key: str) -> Any:
        """Return the value of a required key. Raises ValueError if it is missing."""
        if key not in self.values:
            raise ValueError(f"{self.path} has no {key}")
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an optional key; `default` if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def check(self, fixed: Mapping[str, Any], *, has_default: bool) -> None:
        """Raise ValueError unless every key has the one value that our transformer computes.

        Args:
            fixed: keys and their required values.
            has_default: whether the value is also the original code's default for a key that is missing or null.
        """
        for key, value in fixed.items():
            found = self.get(key, value) if has_default else self[key]
            if found != value:
                raise ValueError(f"{self.path} has {key} = {found!r}; d1 computes {key} = {value!r} only")

    def mask_token_id(self, tokens: Sequence[str]) -> int:
        """Return the mask id. Without one, that of the tokenizer's `mask_token`, or of the first of `tokens` it has.

        Raises ValueError if neither the config nor the tokenizer in its directory has one.
        """
        stated: int | None = self.get("mask_token_id")
        if stated is not None:
            return stated
        declared = self._read_sibling(_TOKENIZER_CONFIG).get("mask_token")
        declared = declared.get("content") if isinstance(declared, dict) else declared
        added = _added_tokens(self._read_sibling(_TOKENIZER)) | _added_tokens(self._read_sibling(_TOKENIZER_CONFIG))
        for token in (declared, *tokens):
            if token in added:
                return added[token]
        names = " or ".join(tokens)
        raise ValueError(f"{self.path} has no mask_token_id, and the tokenizer beside it has no token {names}")

    @property
    def generation(self) -> Mapping[str, Any]:
        """The keys of `generation_config.json` in the same directory; empty if there is none."""
        return self._read_sibling(GENERATION_CONFIG)

    def _read_sibling(self, name: str) -> Mapping[str, Any]:
        path = self.path.with_name(name)
        return read_object(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object. Raises ValueError if it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object: it is a {type(values).__name__}")
    return values


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Map added tokens to their ids: `tokenizer_config.json` has them by id, `tokenizer.json` in a list."""
    by_id = tokenizer.get("added_tokens_decoder") or {}
    listed = tokenizer.get("added_tokens") or []
    return {facts["content"]: int(token) for token, facts in by_id.items()} | {
        facts["content"]: int(facts["id"]) for facts in listed
    }
