"""Starting a run's actors and learner group, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

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
    with pytest.raises(ValueError, match="the name test-sampler-0 is taken"):
        start_actors(spec, 1, "redis://nowhere", "driver")
    assert "keep" not in asked


@pytest.mark.parametrize("placement", [PlacementSection(), PlacementSection(learner="SPREAD", samplers="SPREAD")])
def test_actors_are_placed_by_the_recipe(
    spec: RunSpec, placement: PlacementSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}
    context = SimpleNamespace(get_node_id=lambda: "00" * 28)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "remote", lambda _: _Remote(asked))
    monkeypatch.setattr(module, "watched", lambda _: _Remote(asked))
    spec = spec.model_copy(update={"placement": placement})
    start_actors(spec, 1, "redis://nowhere", "driver")
    assert asked["keep"]["size"] == spec.learner.max_staleness + 2
    assert asked["test-sampler-0"]["scheduling_strategy"] == placement.samplers
    assert "scheduling_strategy" not in asked["test-grader-0"]
    scaling: list[Any] = []

    def noted(trainer: Any) -> None:
        scaling.append(trainer.scaling_config)
        raise ActorDiedError

    monkeypatch.setattr(Trainer, "fit", noted)
    with pytest.raises(LearnerFailedError):
        fit(spec, RunActors(pools=(), coordinator=None, store=None))
    assert scaling[0].placement_strategy == placement.learner
