"""Lookup of the newest policy version in a registry."""

from __future__ import annotations

from actors.registry.records import NEWEST, PolicyVersion
from actors.registry.registry import Registry


def latest(registry: Registry) -> PolicyVersion | None:
    """Return the version announced last, or None."""
    newest = registry.aliases().get(NEWEST)
    return None if newest is None else registry.version(newest)
