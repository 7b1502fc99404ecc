"""A copy of a checkpoint as another family whose tensors have the same names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def adapted(original: Path, directory: Path, model_type: str, **keys: Any) -> Path:
    """Copy a checkpoint, and set another `model_type` and these keys in its config."""
    shutil.copytree(original, directory, copy_function=shutil.copyfile)
    directory.chmod(0o755)
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | {"model_type": model_type, "architectures": None} | keys
    path.write_text(json.dumps(raw))
    return directory
