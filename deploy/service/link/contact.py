"""An engine's address and credentials: where it takes jobs, and from whom."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"
IDLE_TIMEOUT_S = 60.0
"""How long a connection without a job is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """Where an engine takes jobs, and from whom."""

    replica: str
    """The engine's id."""
    host: str
    port: int
    secret: bytes = field(repr=False)
    """What signs each message."""
