"""Checkpoints as policy versions: a run's newest, the one that a request wants (behind a TTL cache), one by itself."""

from __future__ import annotations

import math
import time
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
    """Checkpoints of a run by version or alias. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._found: dict[str | int, tuple[float, PolicyVersion | None]] = {}
        self._listed: tuple[float, tuple[int, ...]] = -math.inf, ()

    def locate(self, wanted: str | int) -> PolicyVersion | None:
        """The checkpoint of `base`, of `best` or of a version, as it was seconds ago; None where there is none.

        `base` is what the rounds began with: the newest checkpoint before them. `best` solves most validation problems.
        """
        looked_at, found = self._found.get(wanted, (-math.inf, None))
        if time.monotonic() - looked_at > _TTL_S:
            found = self._look_for(wanted)
            # Versions that were asked for and are nowhere do not add up.
            self._found = {alias: self._found[alias] for alias in (BASE, BEST) if alias in self._found}
            self._found[wanted] = time.monotonic(), found
        return found

    def versions(self) -> tuple[int, ...]:
        """Return the policy versions that have checkpoints; cached for seconds, as each has a file to read."""
        looked_at, versions = self._listed
        if time.monotonic() - looked_at > _TTL_S:
            found = servable_checkpoints(self._run_dir / CHECKPOINTS)
            versions = tuple(position.policy_version for position, _ in found)
            self._listed = time.monotonic(), versions
        return versions

    def find(self, version: int) -> PolicyVersion | None:
        """Return the checkpoint of a version; None if there is none. An unknown version costs no look at the disk."""
        return self.locate(version) if version in self.versions() else None

    def _look_for(self, wanted: str | int) -> PolicyVersion | None:
        events = read_events(self._run_dir)
        version = validated_best(events) if wanted == BEST else wanted

        def is_wanted(position: Position) -> bool:
            if wanted == BASE:
                return position.phase in (Phase.UNTRAINED, Phase.SFT)
            return position.policy_version == version

        found = [one for one in servable_checkpoints(self._run_dir / CHECKPOINTS) if is_wanted(one[0])]
        return _version_of(*found[-1], events) if found else None


def latest_checkpoint(run_dir: Path) -> PolicyVersion:
    """What `newest_servable` finds, with its held-out score if it has one. Raises UserError as that does."""
    found = newest_servable(run_dir)
    return _version_of(found.position, found.directory, read_events(run_dir))


def plain_checkpoint(directory: Path) -> PolicyVersion:
    """A checkpoint that is served by itself: the version that its run gave it, or 0."""
    return _version_of(find_position(directory) or _OF_ANOTHER_TOOL, directory, [])
