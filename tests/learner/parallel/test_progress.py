"""Marks of a rank's progress, and the bounds that follow from them."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from learner.model.config import TransformerConfig
from learner.parallel.progress import MIN_BOUND_S, PROGRESS, Place, Progress
from learner.parallel.sharding import ShardedPolicy, make_mesh
from tests.ranks import run_ranks
from tests.tiny_policy import random_policy


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Case:
    """A rank whose steps take as long as a test says."""

    def __init__(self, *, may_compile: bool = False) -> None:
        self.clock = _Clock()
        self.progress = Progress(self.clock)
        self.progress.start(1000.0, may_compile=may_compile)

    def round(self, index: int, seconds: float, kind: str = "training") -> None:
        self.progress.begin(f"round {index}: {kind}")
        for _ in range(3):
            self.progress.mark_forward()
            self.clock.now_s += seconds

    def bound_s(self, activity: str) -> float:
        self.progress.begin(activity)
        return self.progress.place.bound_s


def test_a_place_names_activity_forward_pass_and_collective() -> None:
    progress = _Case().progress
    progress.begin("round 3: training")
    assert str(progress.place) == "round 3: training"
    progress.mark_forward()
    progress.mark_forward()
    assert str(progress.place) == "round 3: training, forward pass 2"
    with progress.in_collective("an all-reduce"):
        assert str(progress.place) == "round 3: training, forward pass 2, in an all-reduce"
        assert progress.place.is_in_collective
    assert not progress.place.is_in_collective
    progress.begin("writing a checkpoint")
    assert str(progress.place) == "writing a checkpoint"
    assert progress.place.num_marks == 4


def test_the_bound_is_a_multiple_of_the_slowest_step_but_not_of_the_first() -> None:
    case = _Case()
    assert case.bound_s("round 0: training") == 1000, "the first one is not measured yet"
    case.round(0, 60.0)
    assert case.bound_s("round 1: training") == 600, "as slow as the first, until another one has been measured"
    case.round(1, 20.0)
    assert case.bound_s("round 2: training") == 200
    case.round(2, 30.0)
    case.round(3, 1.0)
    assert case.bound_s("round 4: training") == 300
    assert case.bound_s("sft, step 7") == 1000, "another kind of activity"


def test_a_step_that_becomes_slower_raises_the_bound_at_once() -> None:
    case = _Case()
    for index in range(3):
        case.round(index, 1.0)
    case.round(3, 100.0)
    assert case.progress.place.bound_s == 1000


def test_the_bound_has_a_minimum_which_is_larger_if_any_step_may_compile() -> None:
    for may_compile, least in ((False, MIN_BOUND_S), (True, 1000.0)):
        case = _Case(may_compile=may_compile)
        for index in range(3):
            case.round(index, 0.001)
        assert case.bound_s("round 3: training") == least


def test_activities_without_forward_passes_keep_the_bound_for_the_policy() -> None:
    case = _Case()
    for _ in range(3):
        case.round(0, 1.0)
        case.progress.begin("writing a checkpoint")
        with case.progress.in_collective("an all-gather"):
            case.clock.now_s += 1
    assert case.progress.place.bound_s == 1000


def test_work_with_its_own_timeouts_has_no_bound_and_is_not_measured() -> None:
    case = _Case()
    for index in range(3):
        case.round(index, 1.0)
        with case.progress.unbounded():
            assert math.isinf(case.progress.place.bound_s)
            case.clock.now_s += 5000
            with case.progress.in_collective("a broadcast from rank 0"):
                case.clock.now_s += 5000
    assert case.bound_s("round 3: training") == MIN_BOUND_S


def test_a_standing_rank_names_its_line_of_d1s_code() -> None:
    """The line where a thread waits shows whether it waits for other ranks."""
    progress, begun, ended = _Case().progress, threading.Event(), threading.Event()

    def wait() -> None:
        with progress.unbounded():
            begun.set()
            ended.wait(60)

    namespace = {"__name__": "learner.parallel.here", "wait": wait}
    exec(compile("def stand():\n    wait()", "here.py", "exec"), namespace)
    thread = threading.Thread(target=namespace["stand"])  # type: ignore[arg-type]
    thread.start()
    assert begun.wait(60)
    assert thread.ident is not None
    place = progress.place.with_line(thread.ident)
    ended.set()
    thread.join()
    assert place.line == "learner.parallel.here, line 2"
    assert not place.is_in_collective


def _rank(rank: int, directory: Path, config: TransformerConfig) -> None:
    """Rank 1 loops in a block's forward until rank 0 is seen to wait for it in a collective of FSDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory / 'at'}", rank=rank, world_size=2)
    policy = ShardedPolicy(random_policy(config), make_mesh("cpu"))
    seen, own_thread = directory / "seen", threading.get_ident()
    found: list[Place] = []

    def loop(*_: object) -> None:
        if rank == 1:
            deadline = time.monotonic() + 60
            while not seen.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append(PROGRESS.place.with_line(own_thread))

    def watch() -> None:
        while not (place := PROGRESS.place).num_marks or not (place := place.with_line(own_thread)).is_in_collective:
            time.sleep(0.01)
        found.append(place)
        seen.touch()

    policy.module.blocks[0].attn_norm.register_forward_hook(loop)
    dist.barrier()
    PROGRESS.start(1000.0)
    watcher = threading.Thread(target=watch if rank == 0 else str, daemon=True)
    watcher.start()
    with policy.without_gradients():
        policy.module(torch.arange(10)[None])
    watcher.join(60)
    (place,) = found
    assert place.num_marks == 1, "neither marked anything since the forward pass began"
    assert place.is_in_collective == (rank == 0)
    dist.destroy_process_group()


def test_a_rank_that_waits_in_fsdp_is_told_from_the_one_that_it_waits_for(
    tmp_path: Path, config: TransformerConfig
) -> None:
    run_ranks(_rank, tmp_path, config.model_copy(update={"num_layers": 2}), num=2)
