"""Rebuilding the registry from the run directory, so that a service survives the loss of Redis's data."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import redis

from actors.checkpoints.selection import Position
from actors.registry.files import history_of, read_admin, rebuild, write_admin
from actors.registry.records import DEFAULT_ADMIN_STATE, AdminState, EventKind, PolicyVersion
from actors.registry.registry import Registry
from actors.registry.server import ValkeyServer, free_port
from actors.run_log import append_event, read_events
from actors.spec import Phase
from learner.model.checkpoint import save_checkpoint
from learner.model.transformer import Transformer
from tests.announced import latest

POSITIONS = {
    "initial": (Phase.UNTRAINED, 0, 0),
    "sft": (Phase.SFT, 0, 1),
    "rl-000002": (Phase.RL, 2, 3),
    "control": (Phase.CONTROL, 3, 5),
}


def _evaluation(label: str, version: int, num_correct: int) -> dict[str, object]:
    return {
        "event": "evaluation",
        "label": label,
        "policy_version": version,
        "num_correct": num_correct,
        "num_problems": 9,
    }


EVENTS = [
    {"event": "run", "name": "tiny"},
    _evaluation("untrained", 0, 0),
    _evaluation("sft", 1, 2),
    {"event": "round", "round": 0, "policy_version": 2},
    {"event": "round", "round": 1, "policy_version": 3},
    {"event": "round", "round": 2, "policy_version": 4},
    {"event": "round", "round": 3, "policy_version": 5},
    # After a crash the run is resumed from the checkpoint of version 3.
    {"event": "round", "round": 2, "policy_version": 4},
    _evaluation("rl", 4, 5),
    _evaluation("control", 5, 3),
]


@pytest.fixture
def run_dir(policy: Transformer, tmp_path: Path) -> Path:
    run = tmp_path / "tiny"
    for name, (phase, round_, version) in POSITIONS.items():
        position = Position(
            phase=phase, round=round_, policy_version=version, rl_seconds=0.0, manifest_digest=f"digest of {version}"
        )
        save_checkpoint(
            run / "checkpoints" / name, policy.config, policy.state_dict(), tmp_path, trainer_state=asdict(position)
        )
    lines = [json.dumps({"time_s": 0.0, **event}) + "\n" for event in EVENTS]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer(free_port(), secrets.token_urlsafe(16))
    yield server
    server.stop()


@pytest.fixture
def registry(server: ValkeyServer) -> Iterator[Registry]:
    registry = Registry(server.url, secrets.token_hex(4))
    yield registry
    registry.close()


def _history(run_dir: Path) -> list[PolicyVersion]:
    return history_of(run_dir, read_events(run_dir))


def test_the_history_lists_published_versions(run_dir: Path) -> None:
    history = _history(run_dir)
    assert [(known.version, known.round, known.phase, known.num_correct) for known in history] == [
        (0, 0, "untrained", 0),
        (1, 0, "sft", 2),
        (2, 1, "rl", None),
        (3, 2, "rl", None),
        (4, 3, "rl", 5),
    ]
    with_checkpoint = {known.version: Path(known.checkpoint).name for known in history if known.checkpoint}
    assert with_checkpoint == {0: "initial", 1: "sft", 3: "rl-000002"}


def test_a_score_is_dropped_when_its_version_is_made_again(run_dir: Path) -> None:
    events = read_events(run_dir)
    again = [{"event": "round", "round": 2, "policy_version": 4}]
    assert {known.version: known.num_correct for known in history_of(run_dir, [*events, *again])}[4] is None


def test_a_damaged_checkpoint_is_not_listed(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "rl-000002" / "trainer_state.json").write_text("{")
    assert {known.version: known.checkpoint is not None for known in _history(run_dir)} == {
        0: True,
        1: True,
        2: False,
        3: False,
        4: False,
    }


def test_an_empty_registry_is_rebuilt_once(run_dir: Path, registry: Registry) -> None:
    assert rebuild(registry, run_dir) == 5
    newest = latest(registry)
    # The newest loadable version: version 4's weights were only in a store that may be lost.
    assert newest is not None
    assert (newest.version, Path(str(newest.checkpoint)).name) == (3, "rl-000002")
    assert registry.snapshot().aliases == {"newest": 3, "base": 1}
    before = _everything(registry)
    assert rebuild(registry, run_dir) == 0
    assert _everything(registry) == before
    assert [event.kind for event in registry.events("0")] == [EventKind.REBUILT]


def test_rebuild_restores_the_best_version(run_dir: Path, registry: Registry) -> None:
    for version, right in ((1, 2), (3, 5), (4, 4)):
        scored = {"policy_version": version, "round": 0, "num_correct": right, "num_problems": 10}
        append_event(run_dir, "evaluation", label="validation", **scored)
    rebuild(registry, run_dir)
    assert registry.snapshot().aliases == {"newest": 3, "base": 1, "best": 3}


def test_rebuild_keeps_known_versions(run_dir: Path, registry: Registry) -> None:
    announced = replace(_history(run_dir)[4], weight_store="d1-weights-tiny", manifest_digest="abc")
    registry.announce(announced)
    assert rebuild(registry, run_dir) == 4
    assert latest(registry) == announced
    assert registry.snapshot().aliases == {"newest": 4, "base": 1}


def test_rebuild_completes_known_versions(run_dir: Path, registry: Registry) -> None:
    """The coordinator announced the version and died before it reported checkpoint, score or best version."""
    for version, right in ((1, 2), (3, 5)):
        scored = {"policy_version": version, "round": 0, "num_correct": right, "num_problems": 10}
        append_event(run_dir, "evaluation", label="validation", **scored)
    on_disk = _history(run_dir)[3]
    announced = replace(on_disk, checkpoint=None, num_correct=None, num_problems=None, weight_store="d1-weights-tiny")
    registry.announce(_history(run_dir)[1])
    registry.choose_best(1)
    registry.announce(announced)
    assert rebuild(registry, run_dir) == 3
    whole = replace(on_disk, weight_store="d1-weights-tiny")
    assert (latest(registry), registry.version(3)) == (whole, whole)
    assert registry.snapshot().aliases == {"newest": 3, "base": 1, "best": 3}
    before = _everything(registry)
    assert rebuild(registry, run_dir) == 0
    assert _everything(registry) == before


def test_rebuild_does_not_complete_other_weights(run_dir: Path, registry: Registry) -> None:
    other = replace(_history(run_dir)[3], checkpoint=None, manifest_digest="of a run that was resumed")
    registry.announce(other)
    rebuild(registry, run_dir)
    assert registry.version(3) == other


def test_versions_known_to_a_service_are_announced_again(run_dir: Path, registry: Registry) -> None:
    newest = replace(_history(run_dir)[4], weight_store="d1-weights-tiny", manifest_digest="abc")
    assert rebuild(registry, run_dir, newest) == 5
    assert latest(registry) == newest
    # A newer announcement is kept.
    newer = replace(newest, version=6)
    registry.announce(newer)
    assert rebuild(registry, run_dir, newest) == 0
    assert latest(registry) == newer


def test_rebuild_restores_checksums_of_checkpoints(run_dir: Path, registry: Registry) -> None:
    rebuild(registry, run_dir)
    assert [known and known.manifest_digest for known in map(registry.version, range(5))] == [
        "digest of 0",
        "digest of 1",
        None,
        "digest of 3",
        None,
    ]


def test_a_known_version_gets_no_checkpoint_of_other_weights(run_dir: Path, registry: Registry) -> None:
    newest = replace(_history(run_dir)[3], checkpoint=None, weight_store="d1-weights-tiny", manifest_digest="other")
    rebuild(registry, run_dir, newest)
    assert latest(registry) == newest


def test_a_known_version_keeps_its_checkpoint(run_dir: Path, registry: Registry) -> None:
    on_disk = _history(run_dir)[3]
    rebuild(registry, run_dir, replace(on_disk, checkpoint=None, weight_store="d1-weights-tiny"))
    assert latest(registry) == replace(on_disk, weight_store="d1-weights-tiny")


def test_a_registry_that_lost_its_data_is_rebuilt_during_the_run(
    run_dir: Path, server: ValkeyServer, registry: Registry
) -> None:
    rebuild(registry, run_dir)
    assert registry.serve(3, expected=None)
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert registry.snapshot().aliases == {}
    assert rebuild(registry, run_dir) == 5
    assert registry.serve(3, expected=None)
    assert registry.announce(replace(_history(run_dir)[4], weight_store="d1-weights-tiny"))
    assert registry.snapshot().aliases == {"newest": 4, "base": 1, "policy": 3}


def test_a_registry_of_an_earlier_run_of_the_name_is_rebuilt(run_dir: Path, registry: Registry) -> None:
    registry.announce(replace(_history(run_dir)[4], version=9, checkpoint="/gone"), 1.0)
    registry.serve(9, expected=None)
    registry.set_admin(AdminState(pinned=9, is_paused=True, changed_at=1.0))
    _began_at(run_dir, 2.0)
    assert rebuild(registry, run_dir) == 5
    assert registry.snapshot().aliases == {"newest": 3, "base": 1}
    assert registry.snapshot().admin == DEFAULT_ADMIN_STATE
    # The served version and an operator's settings survive the next start of a service.
    registry.serve(3, expected=None)
    held = AdminState(pinned=1, is_paused=False, changed_at=1.0)
    registry.set_admin(held)
    assert rebuild(registry, run_dir) == 0
    assert registry.snapshot().aliases == {"newest": 3, "base": 1, "policy": 3}
    assert registry.snapshot().admin == held


def test_admin_settings_round_trip(run_dir: Path) -> None:
    assert read_admin(run_dir) == DEFAULT_ADMIN_STATE
    state = AdminState(pinned=1, is_paused=True, why="it adds well", changed_at=1700000000.25)
    write_admin(run_dir, state)
    found = read_admin(run_dir)
    assert (found, found.why, found.changed_at) == (state, "it adds well", 1700000000.25)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pinned": 1}', '{"pinned": 1, "is_paused": true, "more": 1}'])
def test_damaged_admin_settings_are_named(run_dir: Path, text: str) -> None:
    (run_dir / "admin.json").write_text(text)
    with pytest.raises(ValueError, match=r"admin\.json is damaged"):
        read_admin(run_dir)


def _began_at(run_dir: Path, time_s: float) -> None:
    first, *others = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(event) + "\n" for event in (first | {"began_at": time_s}, *others)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def _everything(registry: Registry) -> list[object]:
    versions = [registry.version(number) for number in range(10)]
    return [versions, registry.snapshot().fields, registry.events("0")]
