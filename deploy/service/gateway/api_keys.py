"""API keys: their sources, and the check of a request's key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import UserError, reason
from rewards.data.encoding import decode_text

TOKEN_VARIABLE = "D1_API_TOKEN"  # noqa: S105 - a name
KEYS_FILE_VARIABLE = "D1_API_KEYS_FILE"
TOKEN_FILE = "service.token"  # noqa: S105 - a name
_LEAST_LENGTH = 16
_MADE = re.compile(r"[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKeys:
    """Digests of the keys that open the service; they reveal no key."""

    digests: Mapping[str, bytes]
    """SHA-256 of each key, by its name."""

    @classmethod
    def of(cls, text: str, source: str) -> ApiKeys:
        """Parse keys, one a line: `name:key` or the key alone. Empty lines and those that begin with # are skipped.

        Raises UserError for a key that is too short, or a repeated name.
        """
        digests: dict[str, bytes] = {}
        lines = [line.strip() for line in text.splitlines()]
        for line in filter(lambda line: line and not line.startswith("#"), lines):
            name, colon, key = line.partition(":")
            if not colon or not _NAME.fullmatch(name.strip()):
                name, key = f"key{len(digests) + 1}", line
            name, key = name.strip(), key.strip()
            if len(key) < _LEAST_LENGTH:
                raise UserError(f"{source} has {len(key)} characters in a key; one needs {_LEAST_LENGTH} or more")
            if name in digests:
                raise UserError(f"{source} has two keys named {name}; give each a name of its own")
            digests[name] = digest_of(key)
        if not digests:
            raise UserError(f"{source} has no key; one needs {_LEAST_LENGTH} or more characters")
        return cls(digests=digests)

    def owner(self, authorization: list[bytes]) -> str | None:
        """Return the name of the key in the `Authorization` headers of a request; None without a valid one."""
        if len(authorization) != 1 or not authorization[0].lower().startswith(b"bearer "):
            return None
        sent, found = hashlib.sha256(authorization[0][7:].strip()).digest(), None
        # Compare all keys, so that the time does not depend on the key sent.
        for name, digest in self.digests.items():
            if hmac.compare_digest(sent, digest):
                found = name
        return found


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def are_explicit() -> bool:
    """Return whether the environment gives the keys, instead of a file that d1 created."""
    # An empty D1_API_KEYS_FILE counts as unset: containers cannot unset a variable.
    return bool(os.environ.get(KEYS_FILE_VARIABLE)) or TOKEN_VARIABLE in os.environ


def own_key(directory: Path) -> str | None:
    """Return the key that d1 created; None if the user set the keys."""
    if are_explicit():
        return None
    text = (directory / TOKEN_FILE).read_text(encoding="utf-8").strip()
    return text if _MADE.fullmatch(text) else None


def read_keys(directory: Path) -> ApiKeys:
    """Read the keys from the environment, or else from the token file in `directory`, created if necessary.

    Raises UserError if they cannot be read or are too short.
    """
    if path := os.environ.get(KEYS_FILE_VARIABLE):
        return ApiKeys.of(_text_of(Path(path), f"{KEYS_FILE_VARIABLE} {path}"), path)
    if TOKEN_VARIABLE in os.environ:
        return ApiKeys.of(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    own = directory / TOKEN_FILE
    try:
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"cannot write {own}: {reason(error)}; set {TOKEN_VARIABLE}") from error
    else:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    # Users who share a run use the key of the first of them, who owns the file.
    return ApiKeys.of(_text_of(own, str(own), f"; set {TOKEN_VARIABLE}"), str(own))


def _text_of(path: Path, called: str, advice: str = "") -> str:
    try:
        return decode_text(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {called}: {reason(error)}{advice}") from error
    except ValueError as error:
        raise UserError(f"cannot read {called}: it is not UTF-8{advice}") from error
