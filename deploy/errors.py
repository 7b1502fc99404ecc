"""Exceptions and exit codes: user errors and failed runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_RUN_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130


class UserError(Exception):
    """User error in one sentence: what is wrong, where, and how to fix it. `main` prints it and exits with status 2."""


class RunFailedError(Exception):
    """Failure of a run that is not a user error, in one sentence. `main` prints it and exits with status 1."""


@contextmanager
def user_errors(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Raise exceptions of these kinds in the block (or the decorated function) as UserError.

    Its message is the first line of theirs, after `prefix`.
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{prefix}{first_line(error)}") from error


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Raise an OSError in the block as UserError: `what` failed, and the system's message."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {reason(error)}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the name of the error if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def reason(error: OSError) -> str:
    """Return the system's error message, as part of a sentence: `no such file or directory`."""
    return (error.strerror or str(error)).lower()
