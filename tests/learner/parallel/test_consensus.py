"""Consensus: every rank follows rank 0's decision, even if rank 0 is slow or fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learner.parallel import consensus as module
from learner.parallel.consensus import LeaderFailedError, Ranks
from tests.ranks import run_ranks

_COLLECTIVE_S = 6.0
"""Timeout of a collective, long enough for a machine that stalls for a while."""
TENSORS = {
    "ids": torch.arange(6).view(2, 3),
    "correct": torch.tensor([True, False]),
    "parts": torch.zeros(2, 0),
    "logps": torch.tensor([-0.5, 1e-30]),
}


def _fail() -> Any:
    raise FloatingPointError("the gradient's norm is nan")


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/port", rank=rank, world_size=2)
    ranks = Ranks(_COLLECTIVE_S)
    assert (ranks.rank, ranks.is_alone) == (rank, False)
    # Evaluated on rank 0 only; other ranks would give another answer.
    assert ranks.broadcast_decision(lambda: {"rank": rank, "seconds": 0.1 + rank}) == {"rank": 0, "seconds": 0.1}
    decision, tensors = ranks.broadcast_tensors(lambda: (["go on", rank], TENSORS))
    assert decision == ["go on", 0]
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert all(tensors[name].dtype == TENSORS[name].dtype for name in TENSORS)
    done: list[int] = []
    # Longer than the timeout of a collective: rank 0 reports meanwhile that it is working.
    ranks.on_rank_0(lambda: (time.sleep(1.5 * _COLLECTIVE_S), done.append(rank)))
    assert done == ([0] if rank == 0 else [])
    with pytest.raises(LeaderFailedError if rank else FloatingPointError):
        ranks.broadcast_decision(_fail)
    assert ranks.broadcast_decision(lambda: "still together") == "still together"
    dist.destroy_process_group()


def _with_short_waits(rank: int, folder: Path) -> None:
    module.HEARTBEAT_S = 0.1
    _rank(rank, folder)


def test_all_ranks_follow_the_decision_of_rank_0(tmp_path: Path) -> None:
    run_ranks(_with_short_waits, tmp_path, num=2)


def test_a_single_process_decides_alone() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.is_alone) == (0, True)
    assert ranks.broadcast_decision(lambda: (1, "two")) == [1, "two"]
    decision, tensors = ranks.broadcast_tensors(lambda: (None, TENSORS))
    assert decision is None
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    with pytest.raises(FloatingPointError):
        ranks.on_rank_0(_fail)
