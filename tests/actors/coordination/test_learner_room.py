"""Room for the learner's workers: what is missing, and what the run says about it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors import learner_room
from actors.coordination import learner_wait
from actors.coordination.learner_wait import LearnerWait
from actors.learner_room import missing_room, placeable_workers, room_text
from actors.resources import GpuSection, PlacementSection
from actors.spec import RunSpec


def _spec(spec: RunSpec, **learner: Any) -> RunSpec:
    sections = {"learner": spec.learner.model_copy(update={"num_workers": 4, **learner}), "device": "cuda"}
    return spec.model_copy(update={**sections, "gpus": GpuSection()})


def test_the_missing_resources_are_counted(spec: RunSpec) -> None:
    spec = _spec(spec)
    assert room_text(spec, 4, {"GPU": 3.0, "CPU": 9.0}) == "1 more GPU of 4"
    assert room_text(spec, 4, {"CPU": 9.0}) == "4 more GPUs of 4"
    assert room_text(spec, 4, {"GPU": 4.0}) == "room for 4 workers of 1 GPU each"
    placed = spec.model_copy(update={"placement": PlacementSection(learner_labels={"pool": "h100"})})
    assert room_text(placed, 4, {"GPU": 2.0}) == "2 more GPUs of 4 on nodes with pool h100"


def test_only_a_waiting_group_of_the_learners_workers_misses_room(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, groups = _spec(spec), dict[str, Any]()
    monkeypatch.setattr(learner_room, "placement_group_table", lambda: groups)
    monkeypatch.setattr(learner_room.ray, "available_resources", lambda: {"GPU": 1.0})
    bundle = {"CPU": 1, "GPU": 1.0}
    groups["placed"] = {"state": "CREATED", "bundles": {0: bundle, 1: bundle}}
    groups["other"] = {"state": "PENDING", "bundles": {0: {"CPU": 3}}}
    assert missing_room(spec) == ""
    groups["waiting"] = {"state": "PENDING", "bundles": dict.fromkeys(range(3), bundle)}
    assert missing_room(spec) == "2 more GPUs of 3"


@pytest.mark.parametrize(("room", "found"), [(9, 8), (8, 8), (5, 5), (3, 3), (2, None)])
def test_the_largest_allowed_number_that_fits_is_taken(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, room: int, found: int | None
) -> None:
    tried: list[int] = []

    def fits(_: RunSpec, size: int) -> bool:
        tried.append(size)
        return size <= room

    monkeypatch.setattr(learner_room, "_fits", fits)
    assert placeable_workers(_spec(spec, num_workers=8, min_workers=3)) == found
    assert len(tried) <= 3


def test_a_wait_is_recorded_once_and_shown_until_it_ends(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, said, missing = [0.0], list[str](), ["1 more GPU of 4"]
    monkeypatch.setattr(learner_wait, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(learner_wait, "missing_room", lambda _: missing[0])
    wait = LearnerWait(_spec(spec, min_workers=2, resource_timeout_s=300.0), said.append)

    async def scene() -> None:
        for now_s[0] in range(0, 122, 2):
            await wait.check(is_down=True)
            assert bool(wait.texts()) == (now_s[0] >= 15)

    asyncio.run(scene())
    outlook = "1 more GPU of 4; after 300 s it goes on with fewer workers, at least 2"
    assert wait.texts() == [f"learner waits 120 s for {outlook}"]
    assert said == [f"the learner waits for {outlook}"]
    asyncio.run(wait.check(is_down=False))
    assert wait.texts() == []
