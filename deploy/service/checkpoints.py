"""Checkpoints as policy versions: a run's newest, one by version or alias, and a single checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from actors.checkpoints.best import validated_best
from actors.checkpoints.selection import Position, find_position, servable_checkpoints
from actors.registry.records import BASE, BEST, PolicyVersion
from actors.run_log import CHECKPOINTS, Event, read_events
from actors.spec import Phase
from deploy.runs.checkpoints import newest_servable

_TTL_S = 5.0
_OF_ANOTHER_TOOL = Position(phase=Phase.UNTRAINED, round=0, policy_version=0, rl_seconds=0.0)


def _version_of(position: Position, directory: Path, events: list[Event]) -> PolicyVersion:
    scores = [
        event
        for event in events
        if event["event"] == "evaluation" and event["policy_version"] == position.policy_version
    ]
    return PolicyVersion(
        version=position.policy_version,
        round=position.round,
        phase=position.phase,
        num_correct=scores[-1]["num_correct"] if scores else None,
        num_problems=scores[-1]["num_problems"] if scores else None,
        checkpoint=str(directory),
        weight_store=None,
        manifest_digest=position.manifest_digest,
    )


class Checkpoints:
    """Checkpoints of a run by version or alias, read from disk every few seconds. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read_at_s = -math.inf
        self._found: tuple[list[Event], Sequence[tuple[Position, Path]]] = [], ()

    def locate(self, wanted: str | int) -> PolicyVersion | None:
        """Return the checkpoint of `base`, of `best` or of a version; None if there is none.

        `base` is what the rounds began with: the newest checkpoint before them. `best` solves most validation problems.
        A version that is unknown is looked for on disk at once.
        """
        found = self._look_up(wanted, _TTL_S)
        return self._look_up(wanted, 0.0) if found is None and isinstance(wanted, int) else found

    def versions(self) -> tuple[int, ...]:
        """Return the policy versions that have checkpoints."""
        return tuple(position.policy_version for position, _ in self._read(_TTL_S)[1])

    def find(self, version: int) -> PolicyVersion | None:
        """Return the checkpoint of a version; None if there was none seconds ago, so that any client may ask."""
        return self._look_up(version, _TTL_S)

    def _look_up(self, wanted: str | int, max_age_s: float) -> PolicyVersion | None:
        events, checkpoints = self._read(max_age_s)
        if wanted == BASE:
            found = [one for one in checkpoints if one[0].phase in (Phase.UNTRAINED, Phase.SFT)]
        else:
            version = validated_best(events) if wanted == BEST else wanted
            found = [one for one in checkpoints if one[0].policy_version == version]
        return _version_of(*found[-1], events) if found else None

    def _read(self, max_age_s: float) -> tuple[list[Event], Sequence[tuple[Position, Path]]]:
        if time.monotonic() - self._read_at_s >= max_age_s:
            self._found = read_events(self._run_dir), servable_checkpoints(self._run_dir / CHECKPOINTS)
            self._read_at_s = time.monotonic()
        return self._found


def latest_checkpoint(run_dir: Path) -> PolicyVersion:
    """Return a run's newest intact checkpoint, with its held-out score. Raises UserError if there is none."""
    found = newest_servable(run_dir)
    return _version_of(found.position, found.directory, read_events(run_dir))


def plain_checkpoint(directory: Path) -> PolicyVersion:
    """Return a single checkpoint, with the version that its run gave it, or 0."""
    return _version_of(find_position(directory) or _OF_ANOTHER_TOOL, directory, [])
