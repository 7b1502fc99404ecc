"""Checkpoint writing: at stage ends, by rounds, by time, at evaluations, and when a run stops.

The contents are gathered while training pauses. A large optional checkpoint is then written in the background: the
gathered tensors are copies, which no update changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from actors.checkpoints.background_writer import BackgroundWriter
from actors.checkpoints.selection import Position, checkpoint_name, prune
from actors.spec import RunSpec
from learner.model.adapter import Adapter
from learner.model.checkpoint import save_checkpoint
from learner.parallel.consensus import Ranks
from learner.parallel.sharding import ShardedPolicy

# Checkpoints by time take at most one part in this many of a run's seconds.
_SHARE_OF_TIME = 20
# A checkpoint that a later stage starts from waits this long for room on the disk, and retries at this interval.
_PATIENCE_S, _PAUSE_S = 600.0, 5.0
# Range of sizes, in bytes, that are written in the background. Smaller ones take a second or so. For larger ones memory
# may not suffice: full weights are gathered once more when the next version is published.
_MIN_BACKGROUND_BYTES, _MAX_BACKGROUND_BYTES = 250_000_000, 40_000_000_000


class CheckpointClient(Protocol):
    """Interface of rank 0 to the coordinator; implemented by `actors/training/run_client.py`."""

    def record(self, event: str, values: Mapping[str, Any]) -> None: ...
    def versions_to_keep(self) -> list[int]: ...


class Checkpointer:
    """Checkpoint writer of rank 0; the other ranks help to gather the contents. At most one write is in progress."""

    def __init__(
        self, spec: RunSpec, policy: ShardedPolicy, ranks: Ranks, client: CheckpointClient, clock: Callable[[], float]
    ) -> None:
        self._spec, self._policy, self._ranks, self._client, self._clock = spec, policy, ranks, client, clock
        self._written_at, self._write_s = clock(), 0.0
        self.newest: Position | None = None
        """Position of the newest checkpoint that this process wrote."""
        self._pending: Position | None = None
        """Position of a background write whose outcome has not been collected."""
        self._background_writer = BackgroundWriter()
        """Background writer, used on rank 0."""

    def is_due(self) -> bool:
        """Return whether the next checkpoint by time is due; rank 0 decides."""
        if self._background_writer.is_busy:
            return False
        every_s = self._spec.checkpoint_every_s
        since_s = self._clock() - self._written_at
        return bool(every_s) and since_s >= max(every_s, _SHARE_OF_TIME * self._write_s)

    def write(
        self,
        position: Position,
        digest: str | None,
        state: Callable[[], Mapping[str, Tensor]] | None,
        adapter: Adapter | None,
        *,
        may_fail: bool,
    ) -> None:
        """Write a checkpoint of the current policy, and prune old ones. A collective.

        Args:
            position: progress of the run.
            digest: manifest digest of the policy's weights, if they were published.
            state: gathers the learner's state within a stage; a collective. None if SFT or the control has ended.
            adapter: the stage's adapter, whole on rank 0, which is written instead of weights; None without LoRA.
            may_fail: whether the checkpoint is optional. Then a failure, as on a full disk, is only recorded, and the
                write may still be in progress on return. A required one is on disk on return; it is retried for
                `_PATIENCE_S`.

        Raises OSError on rank 0, and LeaderFailedError on the others, if a required one cannot be written; and as
        `collect_pending`.
        """
        self.collect_pending()
        began = self._clock()
        contents = _Contents(
            position=replace(position, manifest_digest=digest),
            weights=self._policy.weights_on_rank_0() if adapter is None else None,
            adapter=adapter,
            learner_state=None if state is None else state(),
        )

        def begin() -> bool | None:
            if not may_fail or not _MIN_BACKGROUND_BYTES <= contents.num_bytes <= _MAX_BACKGROUND_BYTES:
                return self._is_written(contents, began, 0.0 if may_fail else _PATIENCE_S)
            what = f"checkpoint {checkpoint_name(position)}"
            self._background_writer.begin(
                what, contents.num_bytes, lambda: self._is_written(contents, began, 0.0, in_background=True)
            )
            return None

        is_written = self._ranks.broadcast_decision(begin)
        if is_written is None:
            self._pending = position
        elif is_written:
            self.newest = position
        self._written_at = self._clock()
        self._write_s = self._written_at - began

    def collect_pending(self) -> None:
        """Wait for the background write, if there is one. A collective.

        Raises TimeoutError on rank 0, and LeaderFailedError on the others, if it takes too long.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if self._ranks.broadcast_decision(self._background_writer.outcome):
            self.newest = pending

    def wait(self) -> None:
        """Wait for the background write on this rank alone, ignoring its outcome: the process and its thread are about
        to end."""
        self._background_writer.wait()

    def _is_written(self, contents: _Contents, began: float, within_s: float, *, in_background: bool = False) -> bool:
        """Write and record a checkpoint, then prune old ones. Returns whether that succeeded.

        With a positive `within_s` it retries for so many seconds, and then raises OSError.
        """
        position, name = contents.position, checkpoint_name(contents.position)
        directory = self._spec.checkpoints_dir / name

        def save() -> None:
            save_checkpoint(
                directory,
                self._policy.config,
                contents.weights,
                self._spec.initial_checkpoint,
                adapter=contents.adapter,
                learner_state=contents.learner_state,
                trainer_state=asdict(position),
            )

        if not self._is_saved(save, name, within_s):
            return False
        beside = {"beside": True} if in_background else {}
        self._record(position, directory, round(self._clock() - began, 3), beside)
        kept = self._client.versions_to_keep()
        prune(self._spec.checkpoints_dir, self._spec.num_checkpoints_kept, kept, position)
        return True

    def _is_saved(self, save: Callable[[], None], name: str, within_s: float) -> bool:
        """Call `save` and return whether it succeeded; retry and raise as in `_is_written`."""
        began = time.monotonic()
        is_told = False
        while True:
            try:
                save()
            except OSError as error:
                if not is_told:
                    is_told = True
                    self._client.record("failure", {"what": f"checkpoint {name}: {error}", "attempt": 1})
                if not within_s:
                    return False
                if time.monotonic() - began > within_s:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return True

    def _record(self, position: Position, directory: Path, seconds: float, beside: Mapping[str, bool]) -> None:
        under_way = {} if position.step is None else {"step": position.step}
        self._client.record(
            "checkpoint",
            {
                "path": str(directory.relative_to(self._spec.run_dir)),
                "phase": position.phase,
                "round": position.round,
                "policy_version": position.policy_version,
                "seconds": seconds,
                **under_way,
                **beside,
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """Contents of a checkpoint, on rank 0: copies, which training does not change."""

    position: Position
    weights: Mapping[str, Tensor] | None
    adapter: Adapter | None
    learner_state: Mapping[str, Tensor] | None

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors."""
        matrices = None if self.adapter is None else self.adapter.matrices
        parts = (self.weights, matrices, self.learner_state)
        return sum(tensor.nbytes for part in parts for tensor in (part or {}).values())
