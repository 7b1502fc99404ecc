"""Writing a run's checkpoints: where a stage ends, by rounds, by time, at the best accuracy, and when a run stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

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


class CheckpointClient(Protocol):
    """Whom rank 0 tells of it: `actors/training/run_client.py`."""

    def record(self, event: str, values: Mapping[str, Any]) -> None: ...
    def versions_to_keep(self) -> list[int]: ...


class Checkpointer:
    """Writes them on rank 0; the other ranks help to gather what is in them."""

    def __init__(
        self, spec: RunSpec, policy: ShardedPolicy, ranks: Ranks, client: CheckpointClient, clock: Callable[[], float]
    ) -> None:
        self._spec, self._policy, self._ranks, self._client, self._clock = spec, policy, ranks, client, clock
        self._written_at, self._write_s = clock(), 0.0
        self.newest: Position | None = None
        """Where the run stood at the newest one that this process wrote."""
        self.newest_is_whole = False
        """Whether that has weights of its own."""

    def is_due(self) -> bool:
        """Whether it is time for another; for rank 0 to decide."""
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
        is_whole: bool,
    ) -> None:
        """A checkpoint of the policy as it is, and away with those that are not kept. A collective.

        Args:
            position: where the run stands.
            digest: the policy's weights', where they were published.
            state: gives what the learner of a stage under way goes on with; a collective. None where SFT or the control
                has ended.
            adapter: that of the stage, whole on rank 0; None without LoRA.
            may_fail: the run can do without this one: that it cannot be written, as on a full disk, is recorded. Else
                it is tried again for `_PATIENCE_S`.
            is_whole: it has the policy's weights, and not the adapter and what that stands on alone.

        Raises OSError on rank 0, and LeaderFailedError on the others, when it cannot be written and may not fail.
        """
        began = self._clock()
        weights = self._policy.weights_on_rank_0() if is_whole else None
        learner_state = None if state is None else state()
        directory = self._spec.checkpoints_dir / checkpoint_name(position)

        def save() -> None:
            save_checkpoint(
                directory,
                self._policy.config,
                weights,
                self._spec.initial_checkpoint,
                adapter=adapter,
                learner_state=learner_state,
                trainer_state=asdict(replace(position, manifest_digest=digest)),
            )

        def on_rank_0() -> bool:
            if not self._is_saved(save, directory.name, 0.0 if may_fail else _PATIENCE_S):
                return False
            self._record(position, directory, round(self._clock() - began, 3))
            prune(
                self._spec.checkpoints_dir, self._spec.num_checkpoints_kept, self._client.versions_to_keep(), position
            )
            return True

        if self._ranks.agreed(on_rank_0):
            self.newest, self.newest_is_whole = position, is_whole
        self._written_at = self._clock()
        self._write_s = self._written_at - began

    def _is_saved(self, save: Callable[[], None], name: str, patience_s: float) -> bool:
        """Whether it could be saved, within `patience_s` seconds if that is more than none; else it raises."""
        began = time.monotonic()
        is_told = False
        while True:
            try:
                save()
            except OSError as error:
                if not is_told:
                    is_told = True
                    self._client.record("failure", {"what": f"checkpoint {name}: {error}", "attempt": 1})
                if not patience_s:
                    return False
                if time.monotonic() - began > patience_s:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return True

    def _record(self, position: Position, directory: Path, seconds: float) -> None:
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
            },
        )
