"""Which of the learner's ranks stand still, and which of these are ended."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordination import supervisor as module
from actors.coordination.supervisor import Supervisor
from learner.parallel.progress import Place

PLACE = Place(num_marks=0, activity="round 3: training", where="", is_in_collective=False, bound_s=120.0)


class _Case:
    """A supervisor of ranks, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.said, self.ended = 0.0, list[str](), list[str]()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(module.ray, "kill", lambda actor, **_: self.ended.append(actor))
        self.outage_s = 0.0
        pools: Any = SimpleNamespace(members=dict, longest_outage=lambda: ("grader", self.outage_s))
        self.supervisor = Supervisor(pools, None, lambda what, _: self.said.append(what), room_timeout_s=40.0)
        self.supervisor.liveness.probe = lambda *_: None  # type: ignore[method-assign]
        self.supervisor.liveness._now = lambda: self.now_s
        self.supervisor.liveness._swept_at = 0.0

    def beat(self, *places: Place, seconds: float = 1.0) -> None:
        """Let time pass, and every rank send a heartbeat."""
        self.now_s += seconds
        for rank, place in enumerate(places):
            self.supervisor.heartbeat(rank, place, f"actor {rank}", f"node-{rank}")
        self.supervisor.sweep()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> _Case:
    return _Case(monkeypatch)


def _place(num_marks: int, where: str = "", **others: Any) -> Place:
    return replace(PLACE, num_marks=num_marks, where=where, is_in_collective=where.startswith("in "), **others)


def test_the_rank_that_others_wait_for_is_named_and_ended(case: _Case) -> None:
    for _ in range(121):
        case.beat(_place(8, "in an all-reduce"), _place(7, line="learner.round, line 9"), _place(8, "in an all-reduce"))
    assert case.ended == []
    case.beat(_place(8, "in an all-reduce"), _place(7, line="learner.round, line 9"), _place(8, "in an all-reduce"))
    assert case.ended == ["actor 1"]
    (what,) = case.said
    assert what == (
        "learner rank 1 on node-1 made no progress for 121 s, 120 s are allowed: round 3: training, at learner.round, "
        "line 9; rank 0 on node-0 waits: round 3: training, in an all-reduce; rank 2 on node-2 waits: "
        "round 3: training, in an all-reduce; the group is restarted"
    )
    for _ in range(300):
        case.beat(_place(8, "in an all-reduce"), _place(7), _place(8))
    assert case.ended == ["actor 1"], "the group ends as a whole"


def test_a_waiting_rank_is_not_blamed_for_one_with_a_larger_bound(case: _Case) -> None:
    for _ in range(500):
        case.beat(_place(8, "in an all-reduce"), _place(7, bound_s=900.0))
    assert case.said == case.ended == []


def test_at_the_same_place_the_rank_outside_of_collectives_is_the_stuck_one(case: _Case) -> None:
    for _ in range(125):
        case.beat(_place(7, "in FSDP"), _place(7))
    assert case.ended == ["actor 1"]


def test_ranks_that_all_wait_in_one_collective_are_all_ended(case: _Case) -> None:
    for _ in range(125):
        case.beat(_place(7, "in an all-reduce"), _place(7, "in an all-reduce"))
    assert case.ended == ["actor 0", "actor 1"]
    assert "rank 0 on node-0 made no progress" in case.said[0]
    assert "rank 1 on node-1 made no progress" in case.said[0]


def test_slow_ranks_are_left_alone_as_long_as_they_advance(case: _Case) -> None:
    for step in range(2000):
        case.beat(_place(step // 110), _place((step + 50) // 110))
    assert case.ended == []


def test_a_swapped_out_machine_is_not_taken_for_a_stuck_rank(case: _Case) -> None:
    """It sends a heartbeat every 40 s, and so has stood still for two minutes of its own time after 27 minutes."""
    for _ in range(40):
        case.beat(_place(7), _place(7), seconds=40.0)
    assert case.ended == []
    for _ in range(2):
        case.beat(_place(7), _place(7), seconds=40.0)
    assert case.ended


def test_work_with_its_own_timeouts_may_take_any_time(case: _Case) -> None:
    for _ in range(10_000):
        case.beat(_place(7, bound_s=float("inf")), _place(8, "in a broadcast from rank 0"))
    assert case.ended == []


def test_the_next_group_starts_with_no_rank_standing(case: _Case) -> None:
    for _ in range(125):
        case.beat(_place(7))
    case.supervisor.learner_starting()
    for _ in range(120):
        case.beat(_place(7))
    assert case.ended == ["actor 0"]
    for _ in range(5):
        case.beat(_place(7))
    assert case.ended == ["actor 0", "actor 0"]


def test_a_silent_rank_is_named_with_its_node_and_place(case: _Case) -> None:
    case.beat(_place(7), _place(7, "in an all-reduce"))
    for _ in range(50):
        case.beat(_place(8, "in an all-reduce"))
    assert case.said == [
        "learner rank 1 on node-1, last heard of in round 3: training, in an all-reduce, was silent for 46 s and is "
        "replaced"
    ]


def test_a_group_that_may_shrink_makes_room_for_a_pool_once(case: _Case) -> None:
    places = _place(8, activity="round 3: waiting for completions"), _place(8)
    case.outage_s = 39.0
    case.beat(*places)
    assert case.ended == []
    case.outage_s = 41.0
    case.beat(*places)
    assert case.ended == ["actor 0", "actor 1"]
    assert case.said == ["no grader has been up for 41 s: the learner group is restarted, to leave room for one"]
    # It may have another reason than room.
    case.supervisor.learner_starting()
    case.beat(*places)
    assert len(case.ended) == 2
    case.outage_s = 0.0
    case.beat(*places)
    case.outage_s = 41.0
    case.beat(*places)
    assert len(case.ended) == 4, "another outage"


def test_the_smallest_group_makes_no_room(case: _Case) -> None:
    case.outage_s = 41.0
    case.beat(_place(8))
    assert case.ended == []
