"""State of a run's registry, as one hash on Redis holds it, and the changes of a transaction. It needs no Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from actors.registry.records import (
    BASE,
    BEST,
    DEFAULT_ADMIN_STATE,
    NEWEST,
    POLICY,
    AdminState,
    EventKind,
    PolicyVersion,
)

_ALIASES = (NEWEST, POLICY, BASE, BEST)
_ADMIN, _REFUSED, _BEGAN_AT = "admin", "refused", "began_at"
_SUMMARY = (*_ALIASES, _ADMIN, _REFUSED, _BEGAN_AT)
"""Fields of the hash besides the versions: the version of each alias, the operator's settings and the refused versions
(JSON), and the start time of the run."""
_MAX_WHY = 500


Read = Callable[[Sequence[str]], Sequence[str | None]]
"""Reads fields of the hash; None for an absent one."""


class RegistryState:
    """State of a registry. A transaction changes it, and writes the fields and events that are new.

    The metadata of a version is read on demand: a long run has thousands of versions.
    """

    def __init__(self, read: Read = lambda names: [None] * len(names)) -> None:
        """Read the fields besides the versions with `read`; by default the state is empty."""
        self._read = read
        self._stored: dict[str, str | None] = {}
        self.fields: dict[str, str] = {}
        """The fields that are set, as far as they were read or written."""
        self.events: list[str] = []
        """The events to append (JSON)."""
        self.is_of_new_run = False
        """Whether what is stored is of an earlier run of the same name."""
        self._load(_SUMMARY)

    @property
    def changed(self) -> Mapping[str, str]:
        """The fields to write."""
        return {name: text for name, text in self.fields.items() if self._stored.get(name) != text}

    @property
    def aliases(self) -> dict[str, int]:
        """The version of each alias."""
        return {name: int(self.fields[name]) for name in _ALIASES if name in self.fields}

    @property
    def newest(self) -> PolicyVersion | None:
        """The version that was announced last; None if there is none."""
        return self.version(self.aliases[NEWEST]) if NEWEST in self.fields else None

    @property
    def admin(self) -> AdminState:
        """The operator's settings."""
        return AdminState(**json.loads(self.fields[_ADMIN])) if _ADMIN in self.fields else DEFAULT_ADMIN_STATE

    @property
    def refused(self) -> frozenset[int]:
        """The versions that a service has refused."""
        return frozenset(json.loads(self.fields.get(_REFUSED, "[]")))

    def version(self, number: int) -> PolicyVersion | None:
        """Return a version's metadata; None if it is unknown, or a d1 with other fields has written it."""
        self.load([number])
        return decoded(self.fields.get(version_field(number)))

    def load(self, numbers: Sequence[int]) -> None:
        """Read the metadata of several versions at once."""
        names = map(version_field, numbers)
        self._load([name for name in names if name not in self._stored and name not in self.fields])

    def _load(self, names: Sequence[str]) -> None:
        if names and not self.is_of_new_run:
            found = dict(zip(names, self._read(names), strict=True))
            self._stored |= found
            self.fields |= {name: text for name, text in found.items() if text is not None}

    def begin(self, began_at: float | None) -> None:
        """Delete the data of a run of the same name that began before `began_at` (unix time; None: unknown)."""
        before = self.fields.get(_BEGAN_AT)
        if began_at is None or (before is not None and began_at <= float(before)):
            return
        if before is not None:
            self.fields.clear()
            self._stored.clear()
            self.is_of_new_run = True
        self.fields[_BEGAN_AT] = repr(began_at)

    def put(self, policy: PolicyVersion) -> None:
        """Store a version's metadata."""
        self.fields[version_field(policy.version)] = policy.to_json()

    def move(self, alias: str, to: int) -> int | None:
        """Point an alias to a version; returns where it pointed before."""
        before = self.aliases.get(alias)
        self.fields[alias] = str(to)
        return before

    def set_refused(self, version: int, is_refused: bool) -> bool:
        """Record whether a version is refused; returns whether that is new."""
        before = self.refused
        after = before | {version} if is_refused else before - {version}
        self.fields[_REFUSED] = json.dumps(sorted(after))
        return after != before

    def set_admin(self, admin: AdminState) -> None:
        """Store the operator's settings."""
        self.fields[_ADMIN] = json.dumps(asdict(admin))

    def emit(self, kind: EventKind, version: int | None = None, why: str = "") -> None:
        """Emit an event."""
        known = None if version is None else self.version(version)
        round_ = None if known is None else known.round
        self.events.append(
            json.dumps({"kind": kind, "version": version, "round": round_, "why": why[:_MAX_WHY] or None})
        )


def version_field(number: int) -> str:
    """Return the field of the hash that has a version's metadata (JSON)."""
    return f"version:{number}"


def decoded(text: str | None) -> PolicyVersion | None:
    """Decode a version's metadata; None if there is none, or a d1 with other fields has written it."""
    try:
        return None if text is None else PolicyVersion.from_json(text)
    except ValueError:
        return None
