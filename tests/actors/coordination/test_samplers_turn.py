"""The samplers' turn ends with the wait, a stop, or a restart of the learner; shared GPUs are then free."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from actors.coordination.pools import Pools
from actors.coordination.rounds import OpenRounds
from actors.coordination.samplers_turn import ROUND, SamplersTurn, StoppedError


class _Fakes:
    """Rounds and pools that record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forget(self) -> None:
        self.calls.append("forget")

    async def end_turn(self) -> list[str]:
        self.calls.append("release")
        return ["sampler 0 was restarted"]


def _turn(fakes: _Fakes, *, is_colocated: bool = True) -> SamplersTurn:
    def note(what: str, attempt: int) -> None:
        fakes.calls.append(f"{what}, {attempt}")

    return SamplersTurn(cast("OpenRounds", fakes), cast("Pools", fakes), note, is_colocated=is_colocated)


def test_memory_is_released_before_the_wait_ends_where_gpus_are_shared() -> None:
    async def scene(is_colocated: bool) -> list[str]:
        fakes = _Fakes()
        turn = _turn(fakes, is_colocated=is_colocated)
        async with turn.taken(ROUND):
            assert turn.waiting_since is not None
            assert turn.waiting_since[0] == ROUND
            assert await turn.unless_stopped(asyncio.sleep(0, "result")) == "result"
        assert turn.waiting_since is None
        return fakes.calls

    assert asyncio.run(scene(True)) == ["release", "sampler 0 was restarted, 1"]
    assert asyncio.run(scene(False)) == []


@pytest.mark.parametrize("ends", ["stop", "cancel"])
def test_a_stop_and_a_restarted_learner_end_a_wait_but_only_a_stop_ends_later_ones(ends: str) -> None:
    async def scene() -> list[str]:
        fakes = _Fakes()
        turn = _turn(fakes)
        asyncio.get_running_loop().call_later(0.01, getattr(turn, ends))
        with pytest.raises(StoppedError):
            async with turn.taken(ROUND):
                await turn.unless_stopped(asyncio.sleep(60))
        assert turn.waiting_since is None
        if ends == "cancel":
            assert await turn.unless_stopped(asyncio.sleep(0, "result")) == "result"
        else:
            with pytest.raises(StoppedError):
                await turn.unless_stopped(asyncio.sleep(60))
        return fakes.calls

    released = ["release", "sampler 0 was restarted, 1"]
    assert asyncio.run(asyncio.wait_for(scene(), 10)) == (["forget", *released] if ends == "stop" else released)
