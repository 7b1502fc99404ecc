"""Checkpoint selection: the newest intact one to resume or serve from, and pruning of old ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from actors.spec import Phase
from learner.model.checkpoint_files import MANIFEST, TRAINER_STATE, verify_checkpoint
from learner.model.storage.throughput import ReportProgress

# Names of intermediate checkpoints, written within a stage.
_INTERMEDIATE = re.compile(r"(sft|rl|control)-\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Progress of a run: written into every checkpoint, and read back to resume.

    With the run's seed it is all state that is not in tensors. The learning rate depends on the round, each random draw
    on the seed and its purpose, and the problems of a work unit on seed and round. A checkpoint is written between
    rounds, never within an update.
    """

    phase: Phase
    """The stage that was finished last, or that is in progress."""
    round: int
    """Rounds trained."""
    policy_version: int
    """The version of the checkpoint's weights."""
    rl_seconds: float
    """Seconds spent in rounds so far; the control gets the same time."""
    manifest_digest: str | None = None
    """Checksum of the manifest of the checkpoint's tensors. None within a stage of SFT, whose weights were not
    published, and in checkpoints of earlier releases of d1."""
    step: int | None = None
    """Optimizer steps done within SFT or the control; None elsewhere."""
    stage_seconds: float = 0.0
    """Seconds spent in that stage so far."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Build a position from JSON values. Raises ValueError, TypeError or KeyError if they are none."""
        return cls(**{**values, "phase": Phase(values["phase"])})

    @property
    def is_published(self) -> bool:
        """Whether its weights are those of its policy version."""
        return self.step is None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key; later positions have a greater one."""
        return self.policy_version, list(Phase).index(self.phase), self.step or 0


Rule = Callable[[Position], bool]
"""Predicate: whether a checkpoint at that position is eligible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The newest intact checkpoint."""

    directory: Path
    """Its directory."""
    position: Position
    """Progress of the run at it."""
    skipped: tuple[str, ...]
    """One sentence per damaged checkpoint that was skipped; the caller reports them."""


def resumable(num_rounds: int) -> Rule:
    """Return the rule for resuming a run of `num_rounds`.

    The control's checkpoint is eligible if all rounds are done; otherwise more rounds continue from the last of them.
    """
    return lambda position: position.phase is not Phase.CONTROL or position.round >= num_rounds


def servable(position: Position) -> bool:
    """Return whether a service may use it: not the control's, which is a baseline, nor one within SFT."""
    return position.phase is not Phase.CONTROL and position.is_published


def newest_checkpoint(checkpoints_dir: Path, rule: Rule, say: ReportProgress | None = None) -> FoundCheckpoint | None:
    """Return the most advanced checkpoint that is eligible and intact; `say` reports the read throughput.

    None if no checkpoint is eligible. Raises ValueError, which names them, if all eligible ones are damaged.
    """
    found, damaged = [], []
    # A leading dot marks a checkpoint that was being written when the machine died.
    for directory in sorted(checkpoints_dir.glob("[!.]*/")):
        if not (directory / TRAINER_STATE).is_file() and not (directory / MANIFEST).is_file():
            continue  # Not written by a run.
        try:
            position = read_position(directory)
        except ValueError as error:
            # Its position is unknown.
            damaged.append(str(error))
            continue
        if rule(position):
            found.append((directory, position))
    for directory, position in sorted(found, reverse=True, key=lambda item: item[1].order):
        try:
            verify_checkpoint(directory, report=say)
        except ValueError as error:
            damaged.append(str(error))
        else:
            skipped = tuple(f"{what}; going on with checkpoint {directory.name}" for what in damaged)
            return FoundCheckpoint(directory=directory, position=position, skipped=skipped)
    if damaged:
        raise ValueError(f"no checkpoint in {checkpoints_dir} is whole: {'; '.join(damaged)}")
    return None


def servable_checkpoints(checkpoints_dir: Path) -> list[tuple[Position, Path]]:
    """Return the checkpoints that a service may use, oldest version first.

    Their large files are verified on loading, since that takes long. Those with a damaged position are left out, as are
    foreign directories: resuming or serving reports them.
    """
    found = []
    for directory in sorted(checkpoints_dir.glob("[!.]*/")):
        with suppress(ValueError):
            position = read_position(directory)
            if servable(position):
                found.append((position, directory))
    return sorted(found, key=lambda one: one[0].policy_version)


def checkpoint_name(position: Position) -> str:
    """Return the name of a checkpoint's directory: the stage, with the round (RL) or the step (within SFT or the
    control)."""
    if position.phase is Phase.RL:
        return f"{position.phase}-{position.round:06d}"
    return str(position.phase) if position.step is None else f"{position.phase}-{position.step:06d}"


def prune(checkpoints_dir: Path, num_kept: int, versions: Collection[int], now: Position) -> list[Path]:
    """Delete intermediate checkpoints, except the newest `num_kept`, those of `versions` and the last round's.

    Those beyond `now`, the run's current position, belong to an abandoned future and do not count as newest. Unreadable
    ones stay. No other process may be writing a checkpoint. Returns the deleted directories.
    """
    for left in checkpoints_dir.glob(".*"):
        if left.suffix in (".partial", ".deleted", ".earlier"):
            # Left by a process that died while it wrote or deleted one.
            shutil.rmtree(left)
    found = []
    for directory in checkpoints_dir.glob("[!.]*/"):
        with suppress(ValueError):
            found.append((read_position(directory), directory))
    found.sort(key=lambda item: item[0].order)
    intermediate = [item for item in found if _INTERMEDIATE.fullmatch(item[1].name)]
    past = [item for item in intermediate if item[0].order <= now.order]
    rounds = [item for item in past if item[0].phase is Phase.RL]
    kept = {directory for _, directory in (*past[-num_kept:], *rounds[-1:])}
    deleted = []
    for position, directory in intermediate:
        if directory in kept or (position.policy_version in versions and position.is_published):
            continue
        # Rename first, so that no reader sees a partial checkpoint.
        going = directory.with_name(f".{directory.name}.deleted")
        shutil.rmtree(going, ignore_errors=True)
        directory.rename(going)
        shutil.rmtree(going)
        deleted.append(directory)
    return deleted


def is_intermediate(directory: Path) -> bool:
    """Return whether a directory is an intermediate checkpoint, which its run will delete."""
    return _INTERMEDIATE.fullmatch(directory.name) is not None and (directory / TRAINER_STATE).is_file()


def find_position(directory: Path) -> Position | None:
    """Read a checkpoint's position, like `read_position`, but return None in a directory of another tool.

    Transformers' Trainer has a file of that name too. Raises ValueError.
    """
    path = directory / TRAINER_STATE
    if not path.is_file() or not ((directory / MANIFEST).is_file() or _has_position(path)):
        return None
    return read_position(directory)


def _has_position(path: Path) -> bool:
    try:
        return "policy_version" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_position(directory: Path) -> Position:
    """Return the run's progress at a checkpoint. Raises ValueError if its file is damaged."""
    # Verify this file alone: other files are large, and a wrong version would misplace the whole checkpoint.
    verify_checkpoint(directory, [TRAINER_STATE])
    path = directory / TRAINER_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return Position.of(state)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: it does not say where the run stood") from error
