"""Starting a run's actors and its learner group, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors.cluster import LearnerFailedError, RunActors, fit
from actors.spec import RunSpec
from actors.training.trainer import Trainer


def test_a_controller_that_died_is_called_by_its_name(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(_: Any) -> None:
        raise ActorDiedError

    monkeypatch.setattr(Trainer, "fit", died)
    actors = RunActors(pools=(), coordinator=None, store=None)
    with pytest.raises(LearnerFailedError, match=r"^Ray Train's controller died$"):
        fit(spec, actors)
