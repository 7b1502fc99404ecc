"""Which checkpoint of a run counts as its newest: the newest that is whole, and what is not is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from actors.checkpoints import Position, newest_checkpoint, to_answer, to_go_on
from actors.spec import Phase
from learner.model.checkpoint import save_checkpoint
from learner.model.transformer import Transformer

POSITIONS = {
    "initial": (Phase.UNTRAINED, 0, 0),
    "sft": (Phase.SFT, 0, 1),
    "rl-000001": (Phase.RL, 1, 2),
    "rl-000002": (Phase.RL, 2, 3),
    "control": (Phase.CONTROL, 2, 4),
}


@pytest.fixture
def checkpoints(policy: Transformer, tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoints"
    for name, (phase, round_index, version) in POSITIONS.items():
        position = Position(phase=phase, round=round_index, policy_version=version, rl_seconds=1.5)
        weights = policy.state_dict()
        save_checkpoint(directory / name, policy.config, weights, tmp_path, trainer_state=asdict(position))
    return directory


def _name(found: object) -> str:
    assert found is not None
    return found.directory.name  # type: ignore[attr-defined]


def test_the_rules_say_whether_the_controls_counts(checkpoints: Path) -> None:
    assert _name(newest_checkpoint(checkpoints, to_go_on(2))) == "control"
    assert _name(newest_checkpoint(checkpoints, to_go_on(3))) == "rl-000002"
    found = newest_checkpoint(checkpoints, to_answer)
    assert _name(found) == "rl-000002"
    assert found is not None
    assert found.position == Position(phase=Phase.RL, round=2, policy_version=3, rl_seconds=1.5)
    assert found.passed_over == ()


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [_flip_a_bit, _cut_short, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "trainer_state.json", "manifest.json"])
def test_of_a_damaged_one_the_one_before_is_taken_and_it_is_said(
    checkpoints: Path, harm: Callable[[Path], None], file: str
) -> None:
    harm(checkpoints / "rl-000002" / file)
    found = newest_checkpoint(checkpoints, to_answer)
    assert found is not None
    assert _name(found) == "rl-000001"
    (said,) = found.passed_over
    assert "/rl-000002" in said
    assert said.endswith("; going on with checkpoint rl-000001")


def test_what_was_changed_by_hand_is_damaged_too(checkpoints: Path) -> None:
    path = checkpoints / "rl-000002" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"policy_version": 1}))
    assert _name(newest_checkpoint(checkpoints, to_answer)) == "rl-000001"


def test_none_and_none_that_is_whole_are_not_the_same(checkpoints: Path, tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere", to_answer) is None
    assert newest_checkpoint(checkpoints, lambda position: position.policy_version > 8) is None
    for name in POSITIONS:
        _flip_a_bit(checkpoints / name / "model.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .*rl-000002/model\.safetensors is damaged"):
        newest_checkpoint(checkpoints, to_answer)


def test_what_a_run_did_not_write_is_none_of_its_checkpoints(checkpoints: Path) -> None:
    (checkpoints / "best").mkdir()
    (checkpoints / "best" / "config.json").write_text("{}")
    (checkpoints / "notes.txt").write_text("")
    (checkpoints / "rl-000002").rename(checkpoints / ".rl-000002.partial")
    found = newest_checkpoint(checkpoints, to_answer)
    assert found is not None
    assert (_name(found), found.passed_over) == ("rl-000001", ())
