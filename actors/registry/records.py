"""Records of the registry: policy versions, events and operator settings. They need no Redis."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Self

NEWEST, POLICY, BASE, BEST = "newest", "policy", "base", "best"
"""Aliases: the version announced last, the one served, the one that the rounds started from, and the one that solves
most validation problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """Metadata of one published set of weights."""

    version: int
    """The policy version: +1 for each published set of weights, 0 is what training started from."""
    round: int
    """Rounds trained when it was published; 0 before the first."""
    phase: str
    """The stage of the run that made it: untrained, sft, rl or control."""
    num_correct: int | None
    """Problems that it solved in its last evaluation, on held-out or validation problems; None before one."""
    num_problems: int | None
    """Problems of that evaluation; None before one."""
    checkpoint: str | None
    """Checkpoint directory with exactly these weights; None if none was written."""
    weight_store: str | None
    """Ray name of the weight store that holds or held them; None if they were never published there."""
    manifest_digest: str | None
    """Checksum of the manifest of its tensors; None if the publisher made none."""

    def to_json(self) -> str:
        """Encode as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode a JSON object. Raises ValueError if it is not a policy version."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {known.name for known in fields(cls)}:
            raise ValueError("a policy version needs exactly the fields " + ", ".join(f.name for f in fields(cls)))
        for name, value in values.items():
            if not _is_of_type(name, value):
                raise ValueError(f"a policy version's {name} cannot be {value!r}")
        return cls(**values)

    def has_same_weights(self, other: PolicyVersion) -> bool:
        """Return whether both identify the same weights, as far as their digests are known.

        A run resumed from a checkpoint announces its versions a second time.
        """
        digests = {self.manifest_digest, other.manifest_digest} - {None}
        return self.version == other.version and len(digests) < 2

    def filled_from(self, other: PolicyVersion) -> PolicyVersion:
        """Return a copy with the fields of `other` that this lacks, if both have the same weights."""
        if not self.has_same_weights(other):
            return self
        return replace(self, **{name: value for name, value in asdict(other).items() if getattr(self, name) is None})

    def with_checkpoint_of(self, on_disk: PolicyVersion | None) -> PolicyVersion:
        """Return a copy with the checkpoint of `on_disk`, if this has none and both have the same weights."""
        if self.checkpoint is not None or on_disk is None or not self.has_same_weights(on_disk):
            return self
        return replace(self, checkpoint=on_disk.checkpoint)


class EventKind(StrEnum):
    """Kind of a registry event."""

    PUBLISHED = "published"
    """The version was announced."""
    SERVING = "serving"
    """The alias `policy` moved to it."""
    RETIRED = "retired"
    """The alias `policy` moved away from it."""
    REFUSED = "refused"
    """A service refused to serve it."""
    MOVED = "moved"
    """The alias `best` moved to it."""
    PINNED = "pinned"
    """An operator pinned the service to it."""
    UNPINNED = "unpinned"
    """An operator unpinned it."""
    PAUSED = "paused"
    """An operator paused the service's updates to newer versions. Has no version."""
    RESUMED = "resumed"
    """An operator resumed them. Has no version."""
    REBUILT = "rebuilt"
    """The registry was rebuilt from the run directory; earlier events may be lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryEvent:
    """Entry of the registry's event stream."""

    id: str
    """Id in the stream; a reader continues after it."""
    kind: EventKind
    """What happened."""
    version: int | None
    """The policy version; None where there is none."""
    round: int | None
    """Rounds trained when that version was published; None if unknown."""
    why: str | None
    """The reason, as a sentence; None if none was given."""

    @property
    def time_s(self) -> float:
        """Time of the event (unix time), by the clock of the registry's server."""
        return int(self.id.partition("-")[0]) / 1000

    @classmethod
    def from_json(cls, entry_id: str, text: str | bytes) -> Self:
        """Decode a JSON object. Raises ValueError if it is not an event."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {"kind", "version", "round", "why"}:
            raise ValueError("an event needs exactly the fields kind, version, round, why")
        return cls(id=entry_id, **values | {"kind": EventKind(values["kind"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminState:
    """Operator's settings of the service."""

    pinned: int | None
    """The policy version to serve, whatever is announced; None: the newest."""
    is_paused: bool
    """Whether the service keeps its current version."""
    why: str = field(default="", compare=False)
    """Reason of the last change; empty: none was given."""
    changed_at: float = field(default=0.0, compare=False)
    """Time of the last change (unix time); 0: never changed."""


DEFAULT_ADMIN_STATE = AdminState(pinned=None, is_paused=False)
"""Default settings: the service follows the newest version."""


class MalformedEntryError(ValueError):
    """The next event is unreadable; a reader can continue after `entry_id`."""

    def __init__(self, entry_id: str, reason: str) -> None:
        super().__init__(f"entry {entry_id} of the registry cannot be read: {reason}")
        self.entry_id = entry_id


def _is_of_type(name: str, value: object) -> bool:
    if name in ("num_correct", "num_problems"):
        return value is None or (type(value) is int and value >= 0)
    if name in ("version", "round"):
        return type(value) is int and value >= 0
    return isinstance(value, str) or (value is None and name != "phase")
