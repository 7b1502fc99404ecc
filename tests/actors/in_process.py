"""Ray's calls within one process: what is put is the object itself, and a call has answered when it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray


class Handle:
    """The handle of an actor in this process."""

    def __init__(self, actor: Callable[[], Any]) -> None:
        """`actor` gives who answers: after a restart it may be another object."""
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor(), name))


@contextmanager
def in_process(**actors: Handle) -> Iterator[None]:
    """Within the block `ray.put`, `ray.get` and `ray.get_actor`, of actors by name, go without a cluster."""
    with (
        patch.object(ray, "put", lambda value: value),
        patch.object(ray, "get", lambda reference, timeout=None: reference),
        patch.object(ray, "get_actor", lambda name, namespace: actors[name]),
    ):
        yield
