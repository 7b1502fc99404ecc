"""`d1 scale`: its calls of the coordinator and of Ray, with a fake of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import deploy.cli.status
import deploy.job.scaling
from actors import cluster
from actors.cluster import RunActors
from actors.run_log import Event
from deploy.capacity.available import Resources
from deploy.job.scaling import scaling
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import make_spec
from deploy.runs.scale_request import ScaleAnswer, read_request, write_answer

ROOM = Resources(
    where="the cluster at 10.0.0.1:6379",
    cpus=4.0,
    gpus=3,
    memory_bytes=10**12,
    object_store_bytes=10**12,
    machines=(),
    gpu_memory_bytes=None,
    num_machines=1,
    is_ours=False,
)


@dataclass
class _Ray:
    """The calls of the coordinator and of Ray."""

    scaled: list[tuple[str, int, list[str]]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)
    shown: list[Event] = field(default_factory=list)
    failure: str = ""
    failing: tuple[str, ...] = ("sampler", "grader")

    @property
    def scale(self) -> _Ray:
        return self

    def remote(self, kind: str, size: int, added: dict[str, Any]) -> None:
        self.scaled.append((kind, size, list(added)))

    def get(self, _: None, timeout: float) -> None:
        assert timeout
        if self.failure and self.scaled[-1][0] in self.failing:
            raise RuntimeError(self.failure)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    made = _Ray()
    monkeypatch.setattr("ray.get", made.get)
    monkeypatch.setattr("ray.kill", made.killed.append)
    monkeypatch.setattr(cluster, "start_sampler", lambda spec, store, index: (f"sampler {index}", f"sampler {index}"))
    monkeypatch.setattr(cluster, "start_grader", lambda spec, index: (f"grader {index}", f"grader {index}"))
    monkeypatch.setattr(deploy.job.scaling, "resources_of", lambda _: ROOM)
    monkeypatch.setattr(deploy.job.scaling, "_POLL_S", 0.01)
    return made


@pytest.fixture
def under_way(recipe_file: Path, make_run: Callable, events: list[Event], ray: _Ray) -> Callable:
    """A run that may be scaled inside a block, with overrides of its recipe."""

    @contextmanager
    def begin(*overrides: str, serves: bool = False) -> Iterator[Path]:
        recipe = load_recipe(recipe_file, ["rollout.batch_size=4", "learner.group_size=4", *overrides])
        spec = make_spec(recipe, Stages.ALL).model_copy(update={"run_dir": Path("runs/tiny").resolve()})
        actors = RunActors(coordinator=ray, store=None, pools=())
        with scaling(recipe, spec, actors, ray.shown.append, ray.engines.append if serves else None):
            yield spec.run_dir

    make_run("tiny", events[:20])
    return begin


def test_pools_grow_and_shrink_and_a_name_is_never_used_again(under_way: Callable, ray: _Ray, d1: Callable) -> None:
    with under_way(serves=True):
        assert d1("scale", "tiny", "samplers=4", "graders=2", "engines=3").out.splitlines() == [
            *("samplers: 2 -> 4", "graders: 1 -> 2", "engines: 1 -> 3"),
            "note: the rounds of this recipe have 2 work units at a time, so that 2 samplers will be idle except in "
            "evaluations; a recipe with a smaller rollout.batch_size has more",
        ]
        assert d1("scale", "tiny", "samplers=1").out == "samplers: 4 -> 1\n"
        assert d1("scale", "runs/tiny", "samplers=2", "graders=2").out.splitlines() == [
            *("samplers: 1 -> 2", "graders: 2 already"),
        ]
        assert ray.killed == []
    assert ray.scaled == [
        ("sampler", 4, ["sampler 2", "sampler 3"]),
        ("grader", 2, ["grader 1"]),
        ("sampler", 1, []),
        ("sampler", 2, ["sampler 4"]),
    ]
    assert ray.engines == [3]
    # Actors that were added to the run end with it.
    assert ray.killed == ["sampler 2", "sampler 3", "grader 1", "sampler 4"]


def test_an_impossible_request_is_refused_in_one_sentence_and_changes_nothing(
    under_way: Callable, ray: _Ray, d1: Callable
) -> None:
    with under_way():
        d1("scale", "tiny", "graders=2", "samplers=8").assert_refused(
            "the recipe needs 4.4 CPUs (8 samplers, 2 learner workers, 2 graders, 2 more) and the cluster at "
            "10.0.0.1:6379 has 4; take fewer"
        )
        d1("scale", "tiny", "engines=2").assert_refused("engines: this run has no service", "train --serve")
        for word in (
            "samplers=0",
            "samplers=-1",
            "samplers=",
            "samplers=1.5",
            "samplers=100001",
            "samplers=99999999999",
        ):
            d1("scale", "tiny", word).assert_refused(f"{word}: ", "is not a number of samplers from 1 to 100000")
        d1("scale", "tiny", "learners=2").assert_refused("learners=2: a run has samplers, graders, engines; write")
        d1("scale", "tiny", "4").assert_refused("4: a run has samplers")
        d1("scale", "tiny", "samplers=1", "samplers=2").assert_refused("samplers is given twice; give it once")
        d1("scale", "tini", "samplers=2").assert_refused("there is no run tini", "did you mean tiny?")
    assert (ray.scaled, ray.engines, ray.killed) == ([], [], [])


def test_colocated_samplers_cannot_be_scaled(under_way: Callable, d1: Callable) -> None:
    turns = "device=cuda", "gpus.colocate=true", "rollout.num_samplers=2", "learner.num_workers=2"
    with under_way(*turns):
        d1("scale", "tiny", "samplers=1").assert_refused("samplers: each shares a GPU with a learner worker")


def test_an_error_of_ray_is_the_answer_and_the_next_request_is_carried_out(
    under_way: Callable, ray: _Ray, d1: Callable
) -> None:
    with under_way() as run_dir:
        ray.failure = "ray::Coordinator: a long way\nActorDiedError: it is gone"
        d1("scale", "tiny", "samplers=3").assert_refused("the run could not be scaled: ActorDiedError: it is gone")
        ray.failure = ""
        assert d1("scale", "tiny", "samplers=3").out.startswith("samplers: 2 -> 3")
        # An invalid request file is ignored, and does not block later requests.
        (run_dir / ".scale.json").write_text('{"id": "x", "sizes": {"samplers": 0}}')
        time.sleep(0.1)
        assert d1("scale", "tiny", "samplers=2").out.startswith("samplers: 3 -> 2")
    assert [scaled[:2] for scaled in ray.scaled] == [
        *(("sampler", 3), ("sampler", 2), ("sampler", 3), ("sampler", 2)),
    ], "the first is undone"
    assert len(set(ray.killed)) == len(ray.killed) == 2


def test_a_request_that_fails_midway_is_undone(under_way: Callable, ray: _Ray, d1: Callable) -> None:
    ray.failure, ray.failing = "ActorDiedError: it is gone", ("grader",)
    with under_way():
        d1("scale", "tiny", "samplers=3", "graders=2").assert_refused("could not be scaled: ActorDiedError: it is gone")
        assert ray.killed == ["grader 1"], "no pool has it"
        ray.failure = ""
        said = d1("scale", "tiny", "samplers=3", "graders=2").out.splitlines()
        assert said[:2] == ["samplers: 2 -> 3", "graders: 1 -> 2"]
    assert ray.scaled == [
        ("sampler", 3, ["sampler 2"]),
        ("grader", 2, ["grader 1"]),
        ("grader", 1, []),
        ("sampler", 2, []),
        ("sampler", 3, ["sampler 3"]),
        ("grader", 2, ["grader 2"]),
    ]


def test_a_request_is_withdrawn_if_the_run_does_not_answer(
    make_run: Callable, events: list[Event], d1: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.cli.status, "_ANSWERED_WITHIN_S", 0.2)
    run_dir = make_run("tiny", events[:20])
    write_answer(run_dir, ScaleAnswer(id="of another"))
    d1("scale", "tiny", "samplers=2").assert_refused(
        "did not answer within 0 s, and the request was withdrawn", "status tiny"
    )
    assert read_request(run_dir) is None
    make_run("old", events)
    d1("scale", "old", "samplers=2").assert_refused("the run old is not running, so it cannot be scaled")


def test_a_request_from_before_the_run_was_started_is_not_carried_out(under_way: Callable, ray: _Ray) -> None:
    Path("runs/tiny/.scale.json").write_text('{"id": "x", "sizes": {"samplers": 3}}')
    with under_way() as run_dir:
        time.sleep(0.1)
        assert read_request(run_dir) is None
    assert ray.scaled == []
