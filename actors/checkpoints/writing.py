"""Checkpoint writing: at stage ends, by rounds, by time, at evaluations, and when a run stops.

The contents are copied while training pauses. A large optional checkpoint is then written in the background: no update
changes the copies.

With one rank, or an adapter, rank 0 gathers and writes everything. Several ranks that train all weights write shards:
each stages its own rows in main memory and writes them, and rank 0 completes the checkpoint. At the ends of stages it
gathers the weights too, for a directory that other tools read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from actors.checkpoints.background_writer import BackgroundWriter
from actors.checkpoints.selection import Position, checkpoint_name, prune
from actors.spec import RunSpec
from learner.model.adapter import Adapter
from learner.model.checkpoint import save_checkpoint
from learner.parallel.consensus import Ranks
from learner.parallel.sharded_saving import StagedTensors, make_group, save_shards
from learner.parallel.sharding import ShardedPolicy

# Checkpoints by time take at most one part in this many of a run's seconds.
_SHARE_OF_TIME = 20
# Float32 numbers of a checkpoint for each parameter, at most: weights, two moments, a reference.
_NUM_COPIES, _FLOAT_BYTES = 4, 4
# A checkpoint that a later stage starts from waits this long for room on the disk, and retries at this interval.
_RETRY_S, _PAUSE_S = 600.0, 5.0
# Range of sizes, in bytes, that are written in the background. Smaller ones take a second or so. For larger ones the
# memory of rank 0 may not suffice. Shards have no upper limit: each rank copies its own.
_MIN_BACKGROUND_BYTES, _MAX_BACKGROUND_BYTES = 250_000_000, 40_000_000_000


class CheckpointClient(Protocol):
    """Interface of rank 0 to the coordinator; implemented by `actors/training/run_client.py`."""

    def record(self, event: str, values: Mapping[str, Any]) -> None: ...
    def versions_to_keep(self) -> list[int]: ...


class ResumableLearner(Protocol):
    """Interface of a stage's learner: its state for a checkpoint, apart from the policy."""

    def state(self) -> Mapping[str, Tensor]: ...
    def full_state(self) -> Mapping[str, Tensor]: ...


class Checkpointer:
    """Checkpoint writer of all ranks. At most one write is in progress."""

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
        """Background writer of this rank; with a gathered checkpoint, used on rank 0 only."""
        num_bytes = _NUM_COPIES * _FLOAT_BYTES * sum(math.prod(shape) for shape in policy.shapes.values())
        self._group = None if ranks.is_alone or policy.lora.rank else make_group(num_bytes)
        """The ranks, if each writes its shards."""

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
        learner: ResumableLearner | None,
        adapter: Adapter | None,
        *,
        may_fail: bool,
    ) -> None:
        """Write a checkpoint of the current policy, and prune old ones. A collective.

        Args:
            position: progress of the run.
            digest: manifest digest of the policy's weights, if they were published.
            learner: the stage's learner; None if SFT or the control has ended.
            adapter: the stage's adapter, whole on rank 0, which is written instead of weights; None without LoRA.
            may_fail: whether the checkpoint is optional. Then a failure, as on a full disk, is only recorded, and the
                write may still be in progress on return. A required one is on disk on return; it is retried for
                `_RETRY_S`.

        Raises OSError on rank 0, and the same or LeaderFailedError on the others, if a required one cannot be written;
        and as `collect_pending`.
        """
        self.collect_pending()
        began = self._clock()
        contents = self._contents(replace(position, manifest_digest=digest), learner, adapter, is_within=may_fail)
        if self._is_for_background(contents, may_fail=may_fail):
            if contents.shards is not None or self._ranks.rank == 0:
                what = f"checkpoint {checkpoint_name(position)}"
                write = partial(self._is_written, contents, began)
                self._background_writer.begin(what, contents.num_bytes, write)
            self._pending = position
        elif self._is_written_now(contents, began, 0.0 if may_fail else _RETRY_S):
            self.newest = position
        self._written_at = self._clock()
        self._write_s = self._written_at - began

    def _contents(
        self, position: Position, learner: ResumableLearner | None, adapter: Adapter | None, *, is_within: bool
    ) -> _Contents:
        """Copy what is written: whole tensors on rank 0, or this rank's shards. A collective."""
        if self._group is None:
            weights = self._policy.weights_on_rank_0() if adapter is None else None
            state = None if learner is None else learner.full_state()
            return _Contents(position=position, weights=weights, adapter=adapter, learner_state=state, shards=None)
        weights = None if is_within else self._policy.weights_on_rank_0()
        shards = None
        if is_within or learner is not None:
            model, state = (self._policy.weights if is_within else {}), ({} if learner is None else learner.state())
            shards = StagedTensors.stage(model, state)
        return _Contents(position=position, weights=weights, adapter=None, learner_state=None, shards=shards)

    def _is_for_background(self, contents: _Contents, *, may_fail: bool) -> bool:
        """Return whether training continues while a checkpoint is written. A collective."""
        most = _MAX_BACKGROUND_BYTES if contents.shards is None else math.inf
        return bool(
            self._ranks.broadcast_decision(lambda: may_fail and _MIN_BACKGROUND_BYTES <= contents.num_bytes <= most)
        )

    def collect_pending(self) -> None:
        """Wait for the background write, if there is one. A collective.

        Raises TimeoutError on rank 0, and LeaderFailedError on the others, if it takes too long.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if self._ranks.broadcast_decision(self._background_writer.outcome):
            self.newest = pending
        # The other ranks' threads end when rank 0's has ended.
        self._background_writer.wait()

    def wait(self) -> None:
        """Wait for the background write on this rank alone, ignoring its outcome: the process and its thread are about
        to end."""
        self._background_writer.wait()

    def _is_written_now(self, contents: _Contents, began: float, within_s: float) -> bool:
        """Write a checkpoint while training waits; the other arguments are those of `_is_saved`. A collective."""
        if contents.shards is None:
            return bool(
                self._ranks.broadcast_decision(
                    lambda: self._is_saved(contents, within_s) and self._is_finished(contents, began)
                )
            )
        is_saved = self._is_saved(contents, within_s)
        if is_saved:
            self._ranks.on_rank_0(lambda: self._is_finished(contents, began))
        return is_saved

    def _is_written(self, contents: _Contents, began: float) -> bool:
        """Write a checkpoint in the background: on rank 0, or on all ranks if it has shards."""
        is_saved = self._is_saved(contents, 0.0)
        return is_saved and (self._ranks.rank > 0 or self._is_finished(contents, began, in_background=True))

    def _is_saved(self, contents: _Contents, within_s: float) -> bool:
        """Save a checkpoint, on rank 0 or on all ranks if it has shards, and return whether that succeeded.

        With a positive `within_s` it retries for so many seconds, and then raises OSError.
        """
        began = time.monotonic()
        is_told = self._ranks.rank > 0
        while True:
            try:
                self._save(contents)
            except OSError as error:
                if not is_told:
                    is_told = True
                    name = checkpoint_name(contents.position)
                    self._client.record("failure", {"what": f"checkpoint {name}: {error}", "attempt": 1})
                if not within_s:
                    return False
                if self._is_over(contents, began + within_s):
                    raise
                time.sleep(_PAUSE_S)
            else:
                return True

    def _is_over(self, contents: _Contents, end: float) -> bool:
        """Return whether a time of this process has passed, by rank 0's clock if all ranks retry."""
        if contents.shards is None:
            return time.monotonic() > end
        return bool(self._ranks.broadcast_decision(lambda: time.monotonic() > end))

    def _save(self, contents: _Contents) -> None:
        """Save a checkpoint once. Raises OSError, on all ranks if it has shards."""
        directory = self._directory(contents.position)

        def complete(shards: Mapping[str, str] | None = None) -> None:
            save_checkpoint(
                directory,
                self._policy.config,
                contents.weights,
                self._spec.initial_checkpoint,
                adapter=contents.adapter,
                learner_state=contents.learner_state,
                trainer_state=asdict(contents.position),
                shards=shards,
            )

        if contents.shards is None:
            complete()
        else:
            assert self._group is not None, "shards are of several ranks"
            save_shards(directory, contents.shards, self._group, complete)

    def _is_finished(self, contents: _Contents, began: float, *, in_background: bool = False) -> bool:
        """Record a checkpoint, and prune old ones; on rank 0. Returns True."""
        beside = {"beside": True} if in_background else {}
        position = contents.position
        self._record(position, self._directory(position), round(self._clock() - began, 3), beside)
        kept = self._client.versions_to_keep()
        prune(self._spec.checkpoints_dir, self._spec.num_checkpoints_kept, kept, position)
        return True

    def _directory(self, position: Position) -> Path:
        return self._spec.checkpoints_dir / checkpoint_name(position)

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
    """Contents of a checkpoint, as copies, which training does not change: on rank 0, the shards on every rank."""

    position: Position
    weights: Mapping[str, Tensor] | None
    adapter: Adapter | None
    learner_state: Mapping[str, Tensor] | None
    shards: StagedTensors | None

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors, on rank 0."""
        matrices = None if self.adapter is None else self.adapter.matrices
        parts = (self.weights, matrices, self.learner_state)
        whole = sum(tensor.nbytes for part in parts for tensor in (part or {}).values())
        return whole + (0 if self.shards is None else self.shards.num_bytes)
