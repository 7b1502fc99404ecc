"""What a registry was told last."""

from __future__ import annotations

from actors.registry.records import NEWEST, PolicyVersion
from actors.registry.registry import Registry


def latest(registry: Registry) -> PolicyVersion | None:
    """The version announced last; None when there is none."""
    newest = registry.aliases().get(NEWEST)
    return None if newest is None else registry.version(newest)
