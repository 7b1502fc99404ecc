"""What a user did wrong."""

from __future__ import annotations


class UserError(Exception):
    """One sentence: what is wrong, where, and what would be right. `main` prints it and exits with status 2."""


def reason(error: OSError) -> str:
    """What the system says, as a part of a sentence: `no such file or directory`."""
    return (error.strerror or str(error)).lower()
