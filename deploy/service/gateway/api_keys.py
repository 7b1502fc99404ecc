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
from rewards.data.encoding import decode_text

TOKEN_VARIABLE = "D1_API_TOKEN"  # noqa: S105 - a name
KEYS_FILE_VARIABLE = "D1_API_KEYS_FILE"
TOKEN_FILE = "service.token"  # noqa: S105 - a name
ADMIN_TOKEN_VARIABLE = "D1_ADMIN_TOKEN"  # noqa: S105 - a name
ADMIN_KEYS_FILE_VARIABLE = "D1_ADMIN_KEYS_FILE"
ADMIN_TOKEN_FILE = "admin.token"  # noqa: S105 - a name
_LEAST_LENGTH = 16
_MADE = re.compile(r"[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySource:
    """Where keys come from, the first that there is."""

    file_variable: str
    """The variable that names a file of keys."""
    token_variable: str
    """The variable that has keys itself."""
    token_file: str
    """The file in the run directory, which is made if need be."""


OF_SERVICE = KeySource(file_variable=KEYS_FILE_VARIABLE, token_variable=TOKEN_VARIABLE, token_file=TOKEN_FILE)
OF_ADMIN = KeySource(
    file_variable=ADMIN_KEYS_FILE_VARIABLE, token_variable=ADMIN_TOKEN_VARIABLE, token_file=ADMIN_TOKEN_FILE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKeys:
    """The keys that open the service, hashed: useless to whoever reads the service's state."""

    digests: Mapping[str, bytes]
    """SHA-256 of each key, by the name of whom it belongs to."""

    @classmethod
    def of(cls, text: str, source: str) -> ApiKeys:
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


def are_explicit(source: KeySource = OF_SERVICE) -> bool:
    """Whether the environment gives the keys, and not a file that was made here."""
    # A variable that names no file is as none: whoever unsets one in a container leaves it empty.
    return bool(os.environ.get(source.file_variable)) or source.token_variable in os.environ


def own_key(directory: Path) -> str | None:
    """The key that was made here, where it is the one that opens; None where somebody chose the keys."""
    if are_explicit():
        return None
    text = (directory / TOKEN_FILE).read_text(encoding="utf-8").strip()
    return text if _MADE.fullmatch(text) else None


def read_keys(directory: Path, source: KeySource = OF_SERVICE) -> ApiKeys:
    """The keys of a listener; those of its file in `directory` where the environment gives none.

    Raises UserError when they cannot be read or protect nothing.
    """
    if path := os.environ.get(source.file_variable):
        return ApiKeys.of(_text_of(Path(path), f"{source.file_variable} {path}"), path)
    if source.token_variable in os.environ:
        return ApiKeys.of(os.environ[source.token_variable], source.token_variable)
    own = directory / source.token_file
    try:
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"cannot write {own}: {reason(error)}; set {source.token_variable}") from error
    else:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    # A run that several users share has the key of the first of them, whom it belongs to.
    return ApiKeys.of(_text_of(own, str(own), f"; set {source.token_variable}"), str(own))


def _text_of(path: Path, called: str, advice: str = "") -> str:
    try:
        return decode_text(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {called}: {reason(error)}{advice}") from error
    except ValueError as error:
        raise UserError(f"cannot read {called}: it is not UTF-8{advice}") from error


def read_admin_keys(directory: Path, service: ApiKeys) -> ApiKeys:
    """The keys of the admin listener. Raises UserError too where one of them opens the service."""
    admin = read_keys(directory, OF_ADMIN)
    if set(admin.digests.values()) & set(service.digests.values()):
        raise UserError(
            f"a key opens both the service and its admin listener; give {OF_ADMIN.token_variable} or the file named by "
            f"{OF_ADMIN.file_variable} keys of their own"
        )
    return admin
