"""Atomic replacement of small files that other processes read."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically. Errors are ignored: on a full disk the old file stays."""
    temporary = path.with_name(f".{path.name.lstrip('.')}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
