"""Engine states for clients: concurrent requests share one poll of the engines."""

import asyncio
from typing import Any, cast

import pytest

from deploy.service.api.policy_view import EngineWatch


class NoEngines:
    """A backend whose engines do not answer."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def states(self) -> list[Any]:
        self.num_asked += 1
        await asyncio.sleep(0.05)
        return []


def test_concurrent_requests_share_one_poll_of_unresponsive_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that the result stays fresh on a slow machine.
    monkeypatch.setattr("deploy.service.api.policy_view._FRESH_S", 5.0)
    backend = NoEngines()
    watch = EngineWatch(cast(Any, backend))

    async def ask() -> list[list[Any]]:
        return await asyncio.gather(*(watch.states() for _ in range(3)))

    assert asyncio.run(ask()) == [[], [], []]
    assert backend.num_asked == 1
    assert watch.is_stale
