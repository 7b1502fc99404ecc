"""What a user did wrong, and what went wrong in a run."""

from __future__ import annotations

EXIT_RUN_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130


class UserError(Exception):
    """One sentence: what is wrong, where, and what would be right. `main` prints it and exits with status 2."""


class RunFailedError(Exception):
    """A run that failed by itself, in one sentence. `main` prints it and exits with status 1."""


def reason(error: OSError) -> str:
    """What the system says, as a part of a sentence: `no such file or directory`."""
    return (error.strerror or str(error)).lower()
