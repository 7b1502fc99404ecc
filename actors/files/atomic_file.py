"""Atomic replacement of small files that other processes read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old text or the new one. Raises OSError; the old file then stays."""
    temporary = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically. Errors are ignored: on a full disk the old file stays."""
    with suppress(OSError):
        replace_file(path, text)
