"""The pools without Ray: who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.messages import Generation, Portion, PortionKey
from actors.pools import Pools


class _Method:
    """What Ray makes of an actor's method with two returns: a reference, and a value that comes when it is told to."""

    def __init__(self, is_instant: bool) -> None:
        self._is_instant = is_instant
        self.answers: list[asyncio.Future[Any]] = []

    def options(self, num_returns: int) -> _Method:
        assert num_returns == 2
        return self

    def remote(self, *arguments: Any) -> tuple[str, asyncio.Future[Any]]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        if self._is_instant:
            answer.set_result(None)
        return "reference", answer


class _Actor:
    def __init__(self, is_instant: bool) -> None:
        self.generate = self.grade = _Method(is_instant)


def test_a_slow_grader_does_not_keep_the_samplers_waiting() -> None:
    async def scores() -> None:
        sampler, grader = _Actor(is_instant=True), _Actor(is_instant=False)
        pools = Pools([sampler], [grader], sampling_timeout_s=10, grading_timeout_s=10)
        generation = Generation(version=0, learner_start=1)
        portions = [
            Portion(key=PortionKey(round=0, index=index), problems=(), group_ids=(), requests=()) for index in range(5)
        ]
        tasks = [asyncio.create_task(pools.score(generation, portion)) for portion in portions]
        for _ in range(100):
            await asyncio.sleep(0)
        # One grader sits on the first portion, and all five are sampled.
        assert len(sampler.generate.answers) == 5
        assert len(grader.grade.answers) == 1
        while not all(task.done() for task in tasks):
            for answer in grader.grade.answers:
                if not answer.done():
                    answer.set_result("graded")
            await asyncio.sleep(0)
        assert [task.result()[1] for task in tasks] == ["graded"] * 5

    asyncio.run(asyncio.wait_for(scores(), 10))
