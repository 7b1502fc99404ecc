"""A checkpoint's `config.json` as it was written, with refusals that name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(f"{directory} is not a checkpoint: it has no config.json")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} is not a JSON object: it is a {type(values).__name__}")
        return cls(path, values)

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
