"""Exceptions and exit codes: user errors and failed runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_RUN_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130


class UserError(Exception):
    """User error in one sentence: what is wrong, where, and how to fix it. `main` prints it and exits with status 2."""


class RunFailedError(Exception):
    """Failure of a run that is not a user error, in one sentence. `main` prints it and exits with status 1."""


def reason(error: OSError) -> str:
    """Return the system's error message, as part of a sentence: `no such file or directory`."""
    return (error.strerror or str(error)).lower()


@contextmanager
def os_errors(failed: str) -> Iterator[None]:
    """Convert an OSError to a UserError: what `failed`, such as `cannot write FILE`, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{failed}: {reason(error)}") from error


@contextmanager
def value_errors(place: str = "") -> Iterator[None]:
    """Convert a ValueError to a UserError, whose message begins with `place`."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{place}{error}") from error
