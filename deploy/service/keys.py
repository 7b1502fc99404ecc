"""API keys: where they come from, and whether a request has one."""

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

TOKEN_VARIABLE = "D1_API_TOKEN"  # noqa: S105 - a name
KEYS_FILE_VARIABLE = "D1_API_KEYS_FILE"
TOKEN_FILE = "service.token"  # noqa: S105 - a name
_LEAST_LENGTH = 16
_MADE = re.compile(r"[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys that open the service, hashed: useless to whoever reads the service's state."""

    digests: Mapping[str, bytes]
    """SHA-256 of each key, by the name of whom it belongs to."""

    @classmethod
    def of(cls, text: str, source: str) -> Keys:
        """One key on each line, `name:key` or the key alone; empty lines and those that begin with # are none.

        Raises UserError for a key that is too short to protect anything, or a name that comes twice.
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
        """Whose key the `Authorization` headers of a request have; None where it has none that opens."""
        if len(authorization) != 1 or not authorization[0].lower().startswith(b"bearer "):
            return None
        sent, found = hashlib.sha256(authorization[0][7:].strip()).digest(), None
        # All of them, in the same time whether and where one fits.
        for name, digest in self.digests.items():
            if hmac.compare_digest(sent, digest):
                found = name
        return found


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def are_explicit() -> bool:
    """Whether the environment gives the keys, and not a file that was made here."""
    return KEYS_FILE_VARIABLE in os.environ or TOKEN_VARIABLE in os.environ


def own_key(directory: Path) -> str | None:
    """The key that was made here, where it is the one that opens; None where somebody chose the keys."""
    if are_explicit():
        return None
    text = (directory / TOKEN_FILE).read_text(encoding="utf-8").strip()
    return text if _MADE.fullmatch(text) else None


def read_keys(directory: Path) -> Keys:
    """The keys of a service: of D1_API_KEYS_FILE, of D1_API_TOKEN, or else of DIRECTORY/service.token, made if needed.

    Raises UserError when they cannot be read or protect nothing.
    """
    if path := os.environ.get(KEYS_FILE_VARIABLE):
        try:
            return Keys.of(Path(path).read_text(encoding="utf-8"), path)
        except OSError as error:
            raise UserError(f"cannot read {KEYS_FILE_VARIABLE} {path}: {reason(error)}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"cannot read {KEYS_FILE_VARIABLE} {path}: it is not UTF-8") from error
    if TOKEN_VARIABLE in os.environ:
        return Keys.of(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
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
    return Keys.of(own.read_text(encoding="utf-8"), str(own))
