"""Writing a run's checkpoints: where a stage ends, by rounds, by time, where it is evaluated, and when a run stops.

What is in one is gathered while training stands still. A large one that the run can do without is then written beside
the training that goes on: what was gathered are copies, which no update changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from actors.checkpoints.beside import Beside
from actors.checkpoints.selection import Position, checkpoint_name, prune
from actors.spec import RunSpec
from learner.model.adapter import Adapter
from learner.model.checkpoint import save_checkpoint
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy

# One by time takes at most one part in so many of a run's seconds.
_SHARE_OF_TIME = 20
# One that a later stage begins from waits for room on the disk.
_PATIENCE_S, _PAUSE_S = 600.0, 5.0
# Of what a checkpoint beside training may hold. Less is written in a second or so. Of more a machine may not have the
# memory meanwhile: whole weights are gathered once more when the next version is published.
_LEAST_BESIDE, _MOST_BESIDE = 250_000_000, 40_000_000_000


class CheckpointClient(Protocol):
    """Whom rank 0 tells of it: `actors/training/run_client.py`."""

    def record(self, event: str, values: Mapping[str, Any]) -> None: ...
    def versions_to_keep(self) -> list[int]: ...


class Checkpointer:
    """Writes them on rank 0; the other ranks help to gather what is in them. At most one is being written."""

    def __init__(
        self, spec: RunSpec, policy: ShardedPolicy, ranks: Ranks, client: CheckpointClient, clock: Callable[[], float]
    ) -> None:
        self._spec, self._policy, self._ranks, self._client, self._clock = spec, policy, ranks, client, clock
        self._written_at, self._write_s = clock(), 0.0
        self.newest: Position | None = None
        """Where the run stood at the newest one that this process wrote."""
        self._pending: Position | None = None
        """The same of one that is being written beside training, or was: what became of it is not known here yet."""
        self._beside = Beside()
        """Writes that one, on rank 0."""

    def is_due(self) -> bool:
        """Whether it is time for another; for rank 0 to decide."""
        if self._beside.is_busy:
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
        """A checkpoint of the policy as it is, and away with those that are not kept. A collective.

        Args:
            position: where the run stands.
            digest: the policy's weights', where they were published.
            state: gives what the learner of a stage under way goes on with; a collective. None where SFT or the control
                has ended.
            adapter: that of the stage, whole on rank 0, which is written instead of weights; None without LoRA.
            may_fail: the run can do without this one: that it cannot be written, as on a full disk, is recorded. It may
                still be being written when this returns. Else it is on disk then, and tried again for `_PATIENCE_S`.

        Raises OSError on rank 0, and LeaderFailedError on the others, when it cannot be written and may not fail; and
        as `settle`.
        """
        self.settle()
        began = self._clock()
        contents = _Contents(
            position=replace(position, manifest_digest=digest),
            weights=self._policy.weights_on_rank_0() if adapter is None else None,
            adapter=adapter,
            learner_state=None if state is None else state(),
        )

        def begin() -> bool | None:
            if not may_fail or not _LEAST_BESIDE <= contents.num_bytes <= _MOST_BESIDE:
                return self._is_written(contents, began, 0.0 if may_fail else _PATIENCE_S)
            what = f"checkpoint {checkpoint_name(position)}"
            self._beside.begin(what, contents.num_bytes, lambda: self._is_written(contents, began, 0.0, is_beside=True))
            return None

        is_written = self._ranks.agreed(begin)
        if is_written is None:
            self._pending = position
        elif is_written:
            self.newest = position
        self._written_at = self._clock()
        self._write_s = self._written_at - began

    def settle(self) -> None:
        """Wait for one that is being written beside training, if there is one. A collective.

        Raises TimeoutError on rank 0, and LeaderFailedError on the others, when it takes too long.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if self._ranks.agreed(self._beside.outcome):
            self.newest = pending

    def wait(self) -> None:
        """The same on one rank alone, whatever becomes of it: the process is about to end, and its thread with it."""
        self._beside.wait()

    def _is_written(self, contents: _Contents, began: float, within_s: float, *, is_beside: bool = False) -> bool:
        """Whether it could be, within `within_s` seconds if that is more than none; else it raises OSError. Others
        that are not kept go then."""
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
        beside = {"beside": True} if is_beside else {}
        self._record(position, directory, round(self._clock() - began, 3), beside)
        kept = self._client.versions_to_keep()
        prune(self._spec.checkpoints_dir, self._spec.num_checkpoints_kept, kept, position)
        return True

    def _is_saved(self, save: Callable[[], None], name: str, within_s: float) -> bool:
        """Whether it could be saved, within `within_s` seconds if that is more than none; else it raises."""
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
    """What a checkpoint holds, on rank 0: copies, which stay what they are while training goes on."""

    position: Position
    weights: Mapping[str, Tensor] | None
    adapter: Adapter | None
    learner_state: Mapping[str, Tensor] | None

    @property
    def num_bytes(self) -> int:
        """What the tensors take."""
        matrices = None if self.adapter is None else self.adapter.matrices
        parts = (self.weights, matrices, self.learner_state)
        return sum(tensor.nbytes for part in parts for tensor in (part or {}).values())
