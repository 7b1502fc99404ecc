"""A checkpoint's `config.json` as it was written, and what some families leave to the files beside it, with refusals
that name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# What a policy's config is read from.
CONFIG_FILES = (CONFIG, GENERATION_CONFIG, _TOKENIZER_CONFIG)


@dataclass(frozen=True, slots=True)
class RawConfig:
    """The keys of one `config.json`, in its family's words."""

    path: Path
    """The file, for sentences."""
    values: Mapping[str, Any]
    """What it says."""

    @classmethod
    def read(cls, directory: Path) -> RawConfig:
        """The config of a checkpoint directory. Raises ValueError when there is none, or it is not a JSON object."""
        path = directory / CONFIG
        if not path.is_file():
            raise ValueError(f"{directory} is not a checkpoint: it has no {CONFIG}")
        return cls(path, _read_object(path))

    def __getitem__(self, key: str) -> Any:
        """The value of a key that a policy needs. Raises ValueError when it is missing."""
        if key not in self.values:
            raise ValueError(f"{self.path} has no {key}")
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key that may be missing or null: both mean `default`."""
        value = self.values.get(key)
        return default if value is None else value

    def check(self, fixed: Mapping[str, Any], *, may_lack: bool) -> None:
        """Raise ValueError unless every key has the one value that our transformer computes.

        Args:
            fixed: keys and values.
            may_lack: whether a key that is missing or null means that value to the family's original code.
        """
        for key, value in fixed.items():
            found = self.get(key, value) if may_lack else self[key]
            if found != value:
                raise ValueError(f"{self.path} has {key} = {found!r}; d1 computes {key} = {value!r} only")

    def mask_token_id(self, tokens: Sequence[str]) -> int:
        """The mask id. Without one it is the id of the tokenizer's `mask_token`, or of the first of `tokens` it has.

        Raises ValueError where neither the config nor the tokenizer beside it has one.
        """
        stated: int | None = self.get("mask_token_id")
        if stated is not None:
            return stated
        declared = self._beside(_TOKENIZER_CONFIG).get("mask_token")
        declared = declared.get("content") if isinstance(declared, dict) else declared
        added = _added_tokens(self._beside(_TOKENIZER)) | _added_tokens(self._beside(_TOKENIZER_CONFIG))
        for token in (declared, *tokens):
            if token in added:
                return added[token]
        names = " or ".join(tokens)
        raise ValueError(f"{self.path} has no mask_token_id, and the tokenizer beside it has no token {names}")

    @property
    def generation(self) -> Mapping[str, Any]:
        """What the `generation_config.json` beside the config says; nothing where there is none."""
        return self._beside(GENERATION_CONFIG)

    def _beside(self, name: str) -> Mapping[str, Any]:
        path = self.path.with_name(name)
        return _read_object(path) if path.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object: it is a {type(values).__name__}")
    return values


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids of special tokens: `tokenizer_config.json` has them by id, `tokenizer.json` in a list."""
    by_id = tokenizer.get("added_tokens_decoder") or {}
    listed = tokenizer.get("added_tokens") or []
    return {facts["content"]: int(token) for token, facts in by_id.items()} | {
        facts["content"]: int(facts["id"]) for facts in listed
    }
