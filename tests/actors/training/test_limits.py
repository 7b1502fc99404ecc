"""Limits that end a stage, and the ranks' agreement on them."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist

from actors.training.limits import Decision, Limit, Stopwatch, agreed_decision
from learner.parallel.consensus import Ranks
from tests.actors.local_run import Pulse
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("limit", "step", "seconds", "progress"),
    [
        (Limit(num_steps=4), 3, 1e6, 0.75),
        (Limit(num_steps=4), 4, 0.0, 1.0),
        (Limit(num_steps=0), 0, 0.0, 1.0),
        (Limit(num_steps=0, seconds=8.0), 10**6, 2.0, 0.25),
        (Limit(num_steps=4, seconds=8.0), 0, 10.0, 1.25),
    ],
)
def test_a_stage_ends_by_its_time_limit_or_else_by_its_steps(
    limit: Limit, step: int, seconds: float, progress: float
) -> None:
    assert limit.progress(step, seconds) == progress


def test_a_stopwatch_continues_from_earlier_time_and_excludes_pauses() -> None:
    looks = count()
    watch = Stopwatch(lambda: float(next(looks)), before_s=10.0)
    assert watch.seconds() == 11
    with watch.paused():
        # Reads 2 and 6 of the clock are those of the pause.
        assert [next(looks) for _ in range(3)] == [3, 4, 5]
    assert watch.seconds() == 10 + 7 - 4


def _rank(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/port", rank=rank, world_size=2)
    pulse = Pulse("stop" if rank == 0 else "")
    pulse.doing = "stop"
    found = agreed_decision(Ranks(), pulse, lambda: 0.1 + rank, lambda: rank == 1)
    expected = Decision(seconds=0.1, must_save=False, must_stop=True)
    (directory / f"{rank}.json").write_text(json.dumps(found == expected))
    dist.destroy_process_group()


def test_all_ranks_decide_by_rank_0(tmp_path: Path) -> None:
    run_ranks(_rank, tmp_path, num=2)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [True, True]
