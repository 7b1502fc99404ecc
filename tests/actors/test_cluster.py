"""Starting a run's actors and learner group, without Ray."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError
from ray.train import ControllerError

from actors import cluster as module
from actors.cluster import LearnerFailedError, RunActors, fit, start_actors
from actors.resources import PlacementSection
from actors.spec import RunSpec
from actors.training.trainer import Trainer


def test_a_dead_controller_is_named_in_the_error(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(_: Any) -> None:
        raise ActorDiedError

    monkeypatch.setattr(Trainer, "fit", died)
    actors = RunActors(pools=(), coordinator=None, store=None)
    with pytest.raises(LearnerFailedError, match=r"^Ray Train's controller died$"):
        fit(spec, actors)


HERE = "00" * 28


class _Remote:
    """A fake actor class that records the options passed to Ray."""

    def __init__(self, asked: dict[str, dict[str, Any]], taken: str = "") -> None:
        """`taken` is a name already in use by another actor."""
        self._asked, self._name, self._taken = asked, "", taken
        self.keep = SimpleNamespace(remote=lambda size: asked.setdefault("keep", {"size": size}))

    def options(self, name: str, **options: Any) -> _Remote:
        self._asked[name], self._name = options, name
        return self

    def remote(self, *_: Any, **__: Any) -> _Remote:
        if self._name == self._taken:
            raise ValueError(f"the name {self._name} is taken")
        return self


def test_a_second_driver_does_not_change_the_first_drivers_store(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(module, "watched", lambda _: _Remote(asked, taken="test-sampler-0"))
    monkeypatch.setattr(module, "_store_node", lambda _: HERE)
    with pytest.raises(ValueError, match="the name test-sampler-0 is taken"):
        start_actors(spec, 1, "redis://nowhere", "driver", 0)
    assert "keep" not in asked


def _on_nodes(monkeypatch: pytest.MonkeyPatch, object_stores: dict[str, int]) -> None:
    """Pretend to be on the node `HERE` of a cluster with these object stores, and one that has died."""
    nodes = [
        {"NodeID": node, "Alive": True, "Resources": {"object_store_memory": size}}
        for node, size in object_stores.items()
    ]
    dead = {"NodeID": "dd" * 28, "Alive": False, "Resources": {"object_store_memory": 10**15}}
    monkeypatch.setattr(ray, "nodes", lambda: [dead, *nodes])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: HERE))


@pytest.mark.parametrize(("num_bytes", "node"), [(100, HERE), (101, "22" * 28)])
def test_the_weight_store_leaves_the_drivers_machine_if_it_does_not_fit(
    spec: RunSpec, num_bytes: int, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}
    _on_nodes(monkeypatch, {"11" * 28: 50, HERE: 100, "22" * 28: 300})
    monkeypatch.setattr(ray, "remote", lambda _: _Remote(asked))
    monkeypatch.setattr(module, "watched", lambda _: _Remote(asked))
    start_actors(spec, 1, "redis://nowhere", "driver", num_bytes)
    strategy = asked["d1-weights-test"]["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (node, True)
    assert asked["test-coordinator"]["scheduling_strategy"].node_id == HERE


LABELLED = PlacementSection(
    learner="SPREAD", samplers="SPREAD", learner_labels={"pool": "big"}, sampler_labels={"zone": "in(a, b)"}
)


@pytest.mark.parametrize("placement", [PlacementSection(), LABELLED])
def test_actors_are_placed_by_the_recipe(
    spec: RunSpec, placement: PlacementSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}
    _on_nodes(monkeypatch, {HERE: 100})
    monkeypatch.setattr(ray, "remote", lambda _: _Remote(asked))
    monkeypatch.setattr(module, "watched", lambda _: _Remote(asked))
    spec = spec.model_copy(update={"placement": placement})
    start_actors(spec, 1, "redis://nowhere", "driver", 0)
    assert asked["keep"]["size"] == spec.learner.max_staleness + 2
    assert asked["test-sampler-0"]["scheduling_strategy"] == placement.samplers
    assert asked["test-sampler-0"]["label_selector"] == (placement.sampler_labels or None)
    assert "scheduling_strategy" not in asked["test-grader-0"]
    scaling: list[Any] = []

    def noted(trainer: Any) -> None:
        scaling.append(trainer.scaling_config)
        raise ActorDiedError

    monkeypatch.setattr(Trainer, "fit", noted)
    with pytest.raises(LearnerFailedError):
        fit(spec, RunActors(pools=(), coordinator=None, store=None))
    assert scaling[0].placement_strategy == placement.learner
    assert scaling[0].label_selector == (placement.learner_labels or None)


class _Coordinator:
    """A fake coordinator that keeps what is recorded."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.record = SimpleNamespace(remote=lambda _, values: self.said.append(values["what"]))
        self.gave_up = SimpleNamespace(remote=str)


@pytest.mark.parametrize(
    ("fitting", "sizes"),
    [
        (3, [4, 3]),
        # Copies of the policy have two workers each.
        (2, [4, 2]),
        (1, [4, 4]),
    ],
)
def test_without_room_the_group_goes_on_with_as_many_workers_as_fit(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, fitting: int, sizes: list[int]
) -> None:
    learner = spec.learner.model_copy(update={"num_workers": 4, "min_workers": 2, "resource_timeout_s": 7.0})
    sharding = spec.sharding.model_copy(update={"workers_per_copy": 2 if fitting == 2 else 0})
    spec = spec.model_copy(update={"learner": learner, "sharding": sharding})
    tried: list[Any] = []

    def fits_at_the_second_try(trainer: Any) -> None:
        tried.append((trainer.scaling_config.num_workers, os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]))
        if len(tried) == 1:
            raise ControllerError(TimeoutError("no room"))

    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60")
    monkeypatch.setattr(Trainer, "fit", fits_at_the_second_try)
    monkeypatch.setattr("actors.learner_room._fits", lambda _, size: size <= fitting)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    coordinator = _Coordinator()
    fit(spec, RunActors(pools=(), coordinator=coordinator, store=None))
    assert tried == [(size, "7.0") for size in sizes]
    assert coordinator.said == [f"the learner group goes on with {sizes[1]} of 4 workers"]


def test_a_group_that_needs_all_workers_is_not_restarted_on_fewer(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(trainer: Any) -> None:
        assert trainer.run_config.failure_config.controller_failure_limit == -1, "Ray Train waits by itself"
        raise ControllerError(TimeoutError("no room"))

    monkeypatch.setattr(Trainer, "fit", fails)
    with pytest.raises(ControllerError):
        fit(spec, RunActors(pools=(), coordinator=None, store=None))
