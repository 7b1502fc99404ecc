"""Which checkpoint of a run to go on from, or to answer from: the newest that is whole. And which are kept."""

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
from learner.model.storage.throughput import Say

# Those of a stage that was under way.
_PASSING = re.compile(r"(sft|rl|control)-\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands: written into every checkpoint, and read back to go on from it.

    With the run's seed it is all of the state that no tensor has. The learning rate is a function of the round, each
    draw is one of the seed and of what it is for, each portion's problems are one of seed and round. A checkpoint is
    written between rounds, where no inner update is under way.
    """

    phase: Phase
    """The stage that was last finished, or that is under way."""
    round: int
    """Rounds trained."""
    policy_version: int
    """The version of the checkpoint's weights."""
    rl_seconds: float
    """Seconds spent in rounds so far: the control gets as many."""
    manifest_digest: str | None = None
    """Checksum of the manifest of the checkpoint's tensors; None in one of a stage of SFT under way, whose weights were
    not published, and in one that an earlier d1 wrote."""
    step: int | None = None
    """Optimizer steps done of SFT or the control, where that is under way; else None."""
    stage_seconds: float = 0.0
    """Seconds spent in that stage so far."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From JSON. Raises ValueError, TypeError or KeyError for what is no position."""
        return cls(**{**values, "phase": Phase(values["phase"])})

    @property
    def is_published(self) -> bool:
        """Whether its weights are those of its policy version."""
        return self.step is None

    @property
    def order(self) -> tuple[int, int, int]:
        """A later position has a greater one."""
        return self.policy_version, list(Phase).index(self.phase), self.step or 0


Rule = Callable[[Position], bool]
"""Whether a checkpoint at that position counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The newest checkpoint that is whole."""

    directory: Path
    """Where it is."""
    position: Position
    """Where the run stood."""
    passed_over: tuple[str, ...]
    """A sentence for each newer one that is damaged. Whoever uses this one says them aloud."""


def to_go_on(num_rounds: int) -> Rule:
    """For a run of `num_rounds`: the control's counts where all are done; more rounds go on from the last of them."""
    return lambda position: position.phase is not Phase.CONTROL or position.round >= num_rounds


def to_answer(position: Position) -> bool:
    """For a service: never the control's, which is trained to compare with, and no half-trained SFT."""
    return position.phase is not Phase.CONTROL and position.is_published


def newest_checkpoint(checkpoints_dir: Path, rule: Rule, say: Say | None = None) -> FoundCheckpoint | None:
    """The checkpoint that is furthest of those that count and whose files are what was written; `say` is told at which
    rate they are read.

    None where there is none that counts. Raises ValueError, which names them, when all that count are damaged.
    """
    found, damaged = [], []
    # A name with a dot is a checkpoint that was being written when the machine died.
    for directory in sorted(checkpoints_dir.glob("[!.]*/")):
        if not (directory / TRAINER_STATE).is_file() and not (directory / MANIFEST).is_file():
            continue  # Nothing that a run wrote.
        try:
            position = read_position(directory)
        except ValueError as error:
            # How new it is cannot be known.
            damaged.append(str(error))
            continue
        if rule(position):
            found.append((directory, position))
    for directory, position in sorted(found, reverse=True, key=lambda item: item[1].order):
        try:
            verify_checkpoint(directory, say=say)
        except ValueError as error:
            damaged.append(str(error))
        else:
            passed_over = tuple(f"{what}; going on with checkpoint {directory.name}" for what in damaged)
            return FoundCheckpoint(directory=directory, position=position, passed_over=passed_over)
    if damaged:
        raise ValueError(f"no checkpoint in {checkpoints_dir} is whole: {'; '.join(damaged)}")
    return None


def checkpoints_to_answer(checkpoints_dir: Path) -> list[tuple[Position, Path]]:
    """The checkpoints that a service may answer from, the oldest version first.

    Their large files are not looked at, which takes long; who loads one does. What is torn is left out, as is what no
    run wrote: whoever resumes or serves says so.
    """
    found = []
    for directory in sorted(checkpoints_dir.glob("[!.]*/")):
        with suppress(ValueError):
            position = read_position(directory)
            if to_answer(position):
                found.append((position, directory))
    return sorted(found, key=lambda one: one[0].policy_version)


def checkpoint_name(position: Position) -> str:
    """The name of a checkpoint's directory: that of the stage, and where the stage stood unless it had ended."""
    if position.phase is Phase.RL:
        return f"{position.phase}-{position.round:06d}"
    return str(position.phase) if position.step is None else f"{position.phase}-{position.step:06d}"


def prune(checkpoints_dir: Path, num_kept: int, versions: Collection[int], now: Position) -> list[Path]:
    """Delete checkpoints of stages under way, but for the newest `num_kept`, those of `versions` and the last round's.

    What is further than `now`, where the run stands, is of a future that was given up: it is none of the newest. What
    cannot be read stays. Nobody else may be writing a checkpoint. Returns what was deleted.
    """
    for left in checkpoints_dir.glob(".*"):
        if left.suffix in (".partial", ".deleted", ".earlier"):
            # By a process that died over it.
            shutil.rmtree(left)
    found = []
    for directory in checkpoints_dir.glob("[!.]*/"):
        with suppress(ValueError):
            found.append((read_position(directory), directory))
    found.sort(key=lambda item: item[0].order)
    passing = [item for item in found if _PASSING.fullmatch(item[1].name)]
    past = [item for item in passing if item[0].order <= now.order]
    rounds = [item for item in past if item[0].phase is Phase.RL]
    kept = {directory for _, directory in (*past[-num_kept:], *rounds[-1:])}
    deleted = []
    for position, directory in passing:
        if directory in kept or (position.policy_version in versions and position.is_published):
            continue
        # Renamed first: nobody sees half of one.
        going = directory.with_name(f".{directory.name}.deleted")
        shutil.rmtree(going, ignore_errors=True)
        directory.rename(going)
        shutil.rmtree(going)
        deleted.append(directory)
    return deleted


def is_passing(directory: Path) -> bool:
    """Whether a directory is a checkpoint of a stage under way, which its run deletes in time."""
    return _PASSING.fullmatch(directory.name) is not None and (directory / TRAINER_STATE).is_file()


def find_position(directory: Path) -> Position | None:
    """As `read_position`; None in a directory of another tool: transformers' Trainer has a file of that name too.

    Raises ValueError.
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
    """Where the run stood when it wrote a checkpoint. Raises ValueError when its file is not what was written."""
    # By itself: other files are large, and a wrong version would put the whole checkpoint in a wrong place.
    verify_checkpoint(directory, [TRAINER_STATE])
    path = directory / TRAINER_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return Position.of(state)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: it does not say where the run stood") from error
