"""Atomic replacement of small files that are read meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; a disk that is full leaves the older one."""
    beside = path.with_name(f".{path.name.lstrip('.')}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
