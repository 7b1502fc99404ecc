"""What tests of `d1 sample` ask, and a terminal to ask it on."""

from __future__ import annotations

import io

SHORT = {"gen_length": 16, "block_length": 8, "steps": 8}


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True
