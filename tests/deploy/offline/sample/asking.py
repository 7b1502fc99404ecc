"""Requests of the tests of `d1 sample`, and a fake terminal."""

from __future__ import annotations

import io

SHORT = {"gen_length": 16, "block_length": 8, "steps": 8}


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True
