"""Failed startup of a run or its service: the error, and the cleanup of actors."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

from actors.coordination.coordinator import Coordinator
from actors.run_log import read_events
from actors.weights.store import WeightStore
from deploy.errors import RunFailedError
from deploy.job import job
from deploy.recipe.overrides import load_recipe
from deploy.recipe.recipe import Stages
from deploy.runs.run_directory import make_spec

SAID = "the service was not up after 190 s (DEPLOYING)"


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fake a cluster with healthy actors. Returns the actors that were stopped."""
    record = SimpleNamespace(record=SimpleNamespace(remote=lambda *_: None))
    actors, ended = SimpleNamespace(coordinator=record), list[Any]()
    monkeypatch.setattr("actors.cluster.start_actors", lambda *_: actors)
    monkeypatch.setattr("actors.machines.num_machines", lambda: 1)
    monkeypatch.setattr("actors.machines.machines_without", lambda _: [])
    monkeypatch.setattr("actors.cluster.wait_until_ready", lambda _: None)
    monkeypatch.setattr("actors.cluster.fit", lambda *_: None)
    monkeypatch.setattr("actors.cluster.stop_actors", lambda given, **_: ended.append(given))
    monkeypatch.setattr(job, "registry_of_cluster", lambda: "redis://nowhere")
    monkeypatch.setattr(job, "_dead_actor", lambda _: None)
    monkeypatch.setattr(job, "_NODE_ENDS_S", 0.0)
    for name in ("mirrored", "following", "scaling", "checkpoint_on_stop"):
        monkeypatch.setattr(job, name, lambda *_: nullcontext(None))
    return ended


def test_a_service_that_does_not_start_fails_the_run(
    recipe_file: Path, stopped: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(recipe_file, [])
    recipe.run_dir.mkdir(parents=True)

    def fail(*_: Any, **__: Any) -> str:
        raise RunFailedError(SAID)

    monkeypatch.setattr("deploy.service.on_ray.launch.deploy_source", fail)
    spec = make_spec(recipe, Stages.ALL)
    driver = job.Driver(recipe=recipe, spec=spec, mirror=None, num_seen=0, serve=True, on_event=lambda _: None)
    with pytest.raises(RunFailedError) as failed:
        driver.run_on_ray("127.0.0.1:8265", keep_store=False)
    where = recipe.run_dir / "metrics.jsonl"
    assert str(failed.value) == (
        f"the run failed: {SAID}; the failures are in {where}; --resume goes on from the newest checkpoint"
    )
    assert [event["what"] for event in read_events(recipe.run_dir)] == [SAID]
    assert len(stopped) == 1


def test_a_run_starts_without_package_metadata(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when d1 is only on the PYTHONPATH."""
    found = metadata.version

    def version(name: str) -> str:
        if name == "d1":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    recipe = load_recipe(recipe_file, [])
    recipe.run_dir.mkdir(parents=True)
    job._record_start(recipe, Stages.RL, began_at=0.0)
    (begun,) = (event for event in read_events(recipe.run_dir) if event["event"] == "run")
    assert begun["stages"] == "rl"
    assert begun["versions"]["d1"] == "unknown"
    assert begun["versions"]["torch"] == found("torch")


def test_a_process_killed_for_memory_is_reported_in_one_sentence() -> None:
    told = (
        "Task was killed due to the node running low on memory.\n"
        "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io. Consider"
    )
    said = "a machine ran out of memory and Ray killed a process of the run; end other programs or use fewer actors"
    assert job._cause(OutOfMemoryError(told)) == said
    assert job._cause(RuntimeError("first\nlast")) == "RuntimeError: last"


@pytest.mark.parametrize(
    ("coordinator", "store", "expected"),
    [
        (None, None, None),
        (None, ActorDiedError(), "the weight store died"),
        (ActorDiedError(), None, "the coordinator died"),
        (ActorUnavailableError("busy", None), ActorDiedError(), "the weight store died"),
    ],
)
def test_the_actor_whose_death_ended_a_run_is_named(
    monkeypatch: pytest.MonkeyPatch, coordinator: Exception | None, store: Exception | None, expected: str | None
) -> None:
    def call(answer: Exception | None) -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(job, "_call", call)
    actors: Any = SimpleNamespace(
        coordinator=_handle(Coordinator, answer=coordinator), store=_handle(WeightStore, answer=store)
    )
    assert job._dead_actor(actors) == expected


def _handle(cls: type, *, answer: Exception | None) -> SimpleNamespace:
    """Fake an actor handle: it has the methods of the class and no others, and each returns `answer`."""
    methods = (name for name in dir(cls) if not name.startswith("_"))
    return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *_: answer) for name in methods})
