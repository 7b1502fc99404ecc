"""What a registry knows of a run's policy versions: for whoever has no need of Redis too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Self

NEWEST, POLICY, BASE, BEST, PINNED = "newest", "policy", "base", "best", "pinned"
"""Aliases: what was announced last, what is served, what the rounds began from, what solves most validation problems,
what an operator holds on to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """What is known of one published set of weights."""

    version: int
    """The policy version: +1 for each published set of weights, 0 is what training started from."""
    round: int
    """The round that published it; 0 before the first."""
    phase: str
    """The stage of the run that made it: untrained, sft, rl or control."""
    num_correct: int | None
    """Held-out problems that it solves; None while it has not been evaluated."""
    num_problems: int | None
    """Held-out problems that it was asked; None while it has not been evaluated."""
    checkpoint: str | None
    """Directory that holds these very weights; None when none was written."""
    weight_store: str | None
    """Ray name of the weight store that holds or held them; None when they were never published there."""
    manifest_digest: str | None
    """Checksum of the manifest of its tensors; None when the publisher made none."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The policy version of a JSON object. Raises ValueError when it is not one."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise ValueError("a policy version needs exactly the fields " + ", ".join(f.name for f in fields(cls)))
        for name, value in values.items():
            if not _is_of_type(name, value):
                raise ValueError(f"a policy version's {name} cannot be {value!r}")
        return cls(**values)

    def has_same_weights(self, other: PolicyVersion) -> bool:
        """Whether both name the same weights. A run resumed from a checkpoint announces its versions a second time."""
        digests = {self.manifest_digest, other.manifest_digest} - {None}
        return self.version == other.version and len(digests) < 2

    def with_checkpoint_of(self, on_disk: PolicyVersion | None) -> PolicyVersion:
        """The same with the checkpoint of `on_disk`, if it has none itself and that one holds these very weights."""
        if self.checkpoint is not None or on_disk is None or not self.has_same_weights(on_disk):
            return self
        return replace(self, checkpoint=on_disk.checkpoint)


class EventKind(StrEnum):
    """What happened to a policy version."""

    PUBLISHED = "published"
    """It was announced."""
    SERVING = "serving"
    """The alias `policy` came to it."""
    RETIRED = "retired"
    """The alias `policy` went to another."""
    REFUSED = "refused"
    """The service would not serve it."""
    MOVED = "moved"
    """Another alias came to it."""
    PINNED = "pinned"
    """An operator holds the service on it."""
    UNPINNED = "unpinned"
    """No longer."""
    PAUSED = "paused"
    """An operator holds the service on what it has. Of no version."""
    RESUMED = "resumed"
    """No longer. Of no version."""
    REBUILT = "rebuilt"
    """The registry was built again from the run directory; what happened before is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryEvent:
    """Something that happened."""

    id: str
    """The stream's: events are read on after it."""
    kind: EventKind
    """What."""
    version: int | None
    """The policy version; None where there is none."""
    round: int | None
    """The round that published it; None where that is not known."""
    why: str | None
    """A sentence; None where none was given."""

    @property
    def time_s(self) -> float:
        """When, in seconds since 1970, by the clock of the registry's server."""
        return int(self.id.partition("-")[0]) / 1000

    @classmethod
    def from_json(cls, entry_id: str, text: str | bytes) -> Self:
        """The event of a JSON object. Raises ValueError when it is not one."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {"kind", "version", "round", "why"}:
            raise ValueError("an event needs exactly the fields kind, version, round, why")
        return cls(id=entry_id, **values | {"kind": EventKind(values["kind"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminState:
    """What an operator told the service."""

    pinned: int | None
    """The policy version to serve, whatever is announced; None: the newest."""
    is_paused: bool
    """Whether the service keeps what it has."""


NOTHING_HELD = AdminState(pinned=None, is_paused=False)
"""The service goes to what is announced: what holds until an operator says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrySnapshot:
    """What a service is to serve, all of it at one moment."""

    aliases: Mapping[str, int]
    """Which version each alias points to."""
    admin: AdminState
    """What an operator wants."""
    refused: frozenset[int]
    """The versions that a service has refused."""


class MalformedEntryError(ValueError):
    """The next entry of a stream cannot be read; a reader goes on after `entry_id`."""

    def __init__(self, entry_id: str, reason: str) -> None:
        super().__init__(f"entry {entry_id} of the registry cannot be read: {reason}")
        self.entry_id = entry_id


def _is_of_type(name: str, value: object) -> bool:
    if name in ("num_correct", "num_problems"):
        return value is None or (type(value) is int and value >= 0)
    if name in ("version", "round"):
        return type(value) is int and value >= 0
    return isinstance(value, str) or (value is None and name != "phase")
