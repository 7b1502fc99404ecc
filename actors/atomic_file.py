"""Atomic replacement of small files that other processes read."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically. Errors are ignored: on a full disk the old file stays."""
    beside = path.with_name(f".{path.name.lstrip('.')}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
