"""Selection of a run's newest complete checkpoint; incomplete ones are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from actors.checkpoints.selection import (
    Position,
    checkpoint_name,
    newest_checkpoint,
    prune,
    resumable,
    servable,
    servable_checkpoints,
)
from actors.spec import Phase
from learner.model.adapter import Adapter
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


def test_the_controls_checkpoint_is_resumable_but_not_servable(checkpoints: Path) -> None:
    assert _name(newest_checkpoint(checkpoints, resumable(2))) == "control"
    assert _name(newest_checkpoint(checkpoints, resumable(3))) == "rl-000002"
    found = newest_checkpoint(checkpoints, servable)
    assert _name(found) == "rl-000002"
    assert found is not None
    assert found.position == Position(phase=Phase.RL, round=2, policy_version=3, rl_seconds=1.5)
    assert found.skipped == ()


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [_flip_a_bit, _cut_short, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "trainer_state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_and_named(checkpoints: Path, harm: Callable[[Path], None], file: str) -> None:
    harm(checkpoints / "rl-000002" / file)
    found = newest_checkpoint(checkpoints, servable)
    assert found is not None
    assert _name(found) == "rl-000001"
    (said,) = found.skipped
    assert "/rl-000002" in said
    assert said.endswith("; going on with checkpoint rl-000001")


def test_a_checkpoint_edited_by_hand_is_skipped(checkpoints: Path) -> None:
    path = checkpoints / "rl-000002" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"policy_version": 1}))
    assert _name(newest_checkpoint(checkpoints, servable)) == "rl-000001"


def test_no_checkpoint_is_none_and_only_damaged_ones_raise(checkpoints: Path, tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere", servable) is None
    assert newest_checkpoint(checkpoints, lambda position: position.policy_version > 8) is None
    for name in POSITIONS:
        _flip_a_bit(checkpoints / name / "model.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .*rl-000002/model\.safetensors is damaged"):
        newest_checkpoint(checkpoints, servable)


def test_foreign_and_partial_folders_are_ignored(checkpoints: Path) -> None:
    (checkpoints / "best").mkdir()
    (checkpoints / "best" / "config.json").write_text("{}")
    (checkpoints / "notes.txt").write_text("")
    (checkpoints / "rl-000002").rename(checkpoints / ".rl-000002.partial")
    found = newest_checkpoint(checkpoints, servable)
    assert found is not None
    assert (_name(found), found.skipped) == ("rl-000001", ())


def _save(directory: Path, policy: Transformer, *positions: Position) -> None:
    for position in positions:
        state = asdict(position)
        weights = policy.state_dict()
        save_checkpoint(
            directory / checkpoint_name(position), policy.config, weights, directory.parent, trainer_state=state
        )


def _rounds(*rounds: int) -> list[Position]:
    return [Position(phase=Phase.RL, round=done, policy_version=done + 1, rl_seconds=1.0) for done in rounds]


NOW = Position(phase=Phase.CONTROL, round=9, policy_version=10, rl_seconds=1.0, step=9)


def _under_way(phase: Phase, version: int, step: int) -> Position:
    return Position(phase=phase, round=9 if version else 0, policy_version=version, rl_seconds=0.0, step=step)


def test_checkpoints_within_a_stage_are_resumable_but_not_servable(checkpoints: Path, policy: Transformer) -> None:
    _save(checkpoints, policy, _under_way(Phase.SFT, 0, 40), _under_way(Phase.SFT, 0, 120))
    names = [path.name for _, path in servable_checkpoints(checkpoints)]
    assert names == ["initial", "sft", "rl-000001", "rl-000002"]
    for name in ("sft", "rl-000001", "rl-000002", "control"):
        shutil.rmtree(checkpoints / name)
    assert _name(newest_checkpoint(checkpoints, resumable(9))) == "sft-000120"
    _save(checkpoints, policy, *_rounds(9), _under_way(Phase.CONTROL, 10, 7))
    assert _name(newest_checkpoint(checkpoints, resumable(9))) == "control-000007"
    assert _name(newest_checkpoint(checkpoints, servable)) == "rl-000009"


def test_prune_keeps_the_newest_the_best_and_the_ends_of_stages(checkpoints: Path, policy: Transformer) -> None:
    _save(checkpoints, policy, _under_way(Phase.SFT, 0, 40), *_rounds(3, 4, 5, 6))
    deleted = prune(checkpoints, 2, [4], NOW)
    assert sorted(path.name for path in deleted) == ["rl-000001", "rl-000002", "rl-000004", "sft-000040"]
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == ["control", "initial", "rl-000003", "rl-000005", "rl-000006", "sft"]
    assert prune(checkpoints, 2, [4], NOW) == []


def test_prune_keeps_the_last_round_during_the_control(checkpoints: Path, policy: Transformer) -> None:
    _save(checkpoints, policy, *_rounds(9), *(_under_way(Phase.CONTROL, 10, step) for step in (1, 2, 3)))
    prune(checkpoints, 2, [], NOW)
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == ["control", "control-000002", "control-000003", "initial", "rl-000009", "sft"]


def test_prune_keeps_unreadable_checkpoints(checkpoints: Path, policy: Transformer) -> None:
    _save(checkpoints, policy, *_rounds(3, 4, 5))
    (checkpoints / "rl-000001" / "trainer_state.json").write_text("{")
    prune(checkpoints, 1, [], NOW)
    assert (checkpoints / "rl-000001").is_dir()


def test_prune_deletes_checkpoints_abandoned_by_a_rollback(checkpoints: Path, policy: Transformer) -> None:
    """After a rollback, its files may be the reason for the rollback."""
    _save(checkpoints, policy, *_rounds(3, 4, 5, 6))
    prune(checkpoints, 1, [], now=_rounds(4)[0])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["control", "initial", "rl-000004", "sft"]


def test_prune_deletes_leftovers_of_dead_processes(checkpoints: Path, policy: Transformer) -> None:
    (checkpoints / ".rl-000007.partial").mkdir()
    (checkpoints / ".rl-000003.deleted").mkdir()
    prune(checkpoints, 3, [], NOW)
    assert not list(checkpoints.glob(".*"))


def _save_adapters(directory: Path, policy: Transformer, *positions: Position) -> None:
    adapter = Adapter(rank=1, alpha=1, base="sft", matrices={"blocks.0.attn.q_proj.lora_A.weight": torch.ones(1, 32)})
    for position in positions:
        state, name = asdict(position), checkpoint_name(position)
        save_checkpoint(directory / name, policy.config, None, directory.parent, adapter=adapter, trainer_state=state)


def test_an_adapter_checkpoint_needs_an_undamaged_base(checkpoints: Path, policy: Transformer) -> None:
    _save_adapters(checkpoints, policy, *_rounds(3, 4))
    assert _name(newest_checkpoint(checkpoints, servable)) == "rl-000004"
    _flip_a_bit(checkpoints / "rl-000004" / "lora.safetensors")
    assert _name(newest_checkpoint(checkpoints, servable)) == "rl-000003"
    _flip_a_bit(checkpoints / "sft" / "model.safetensors")
    found = newest_checkpoint(checkpoints, servable)
    assert found is not None
    assert _name(found) == "rl-000002"
    assert "/sft/model.safetensors is damaged" in found.skipped[1]
    shutil.rmtree(checkpoints / "sft")
    assert _name(newest_checkpoint(checkpoints, servable)) == "rl-000002"


def test_prune_keeps_the_bases_of_adapters(checkpoints: Path, policy: Transformer) -> None:
    _save_adapters(checkpoints, policy, *_rounds(3, 4, 5))
    prune(checkpoints, 1, [4], NOW)
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == ["control", "initial", "rl-000003", "rl-000005", "sft"]
    assert _name(newest_checkpoint(checkpoints, servable)) == "rl-000005"
