"""Lookup of the newest policy version in a registry."""

from __future__ import annotations

from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry


def latest(registry: Registry) -> PolicyVersion | None:
    """Return the version that was announced last; None if there is none."""
    return registry.snapshot().newest
