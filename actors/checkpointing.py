"""Writing a run's checkpoints: where a stage ends, by rounds, by time, at the best accuracy, and when a run stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from torch import Tensor

from actors.checkpoints import Position, checkpoint_name, prune
from actors.spec import RunSpec
from learner.model.adapter import Adapter
from learner.model.checkpoint import save_checkpoint
from learner.ranks import Ranks
from learner.sharding import ShardedPolicy

# One by time takes at most one part in so many of a run's seconds.
_SHARE_OF_TIME = 20


class Client(Protocol):
    """Whom rank 0 tells of it: `actors/run_client.py`."""

    def record(self, event: str, values: Mapping[str, Any]) -> None: ...
    def versions_to_keep(self) -> list[int]: ...


class Checkpointer:
    """Writes them on rank 0; the other ranks help to gather what is in them."""

    def __init__(
        self, spec: RunSpec, policy: ShardedPolicy, ranks: Ranks, client: Client, clock: Callable[[], float]
    ) -> None:
        self._spec, self._policy, self._ranks, self._client, self._clock = spec, policy, ranks, client, clock
        self._written_at, self._write_s = clock(), 0.0
        self.newest: Position | None = None
        """Where the run stood at the newest one that this process wrote."""

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
    ) -> None:
        """A checkpoint of the policy as it is, and away with those that are not kept. A collective.

        Args:
            position: where the run stands.
            digest: the policy's weights', where they were published.
            state: gives what the learner of a stage under way goes on with; a collective. None where SFT or the control
                has ended.
            adapter: that of the stage, whole on rank 0; None without LoRA.
        """
        began = self._clock()
        weights = self._policy.weights_on_rank_0()
        learner_state = None if state is None else state()

        def on_rank_0() -> None:
            directory = self._spec.checkpoints_dir / checkpoint_name(position)
            save_checkpoint(
                directory,
                self._policy.config,
                weights,
                self._spec.initial_checkpoint,
                adapter=adapter,
                learner_state=learner_state,
                trainer_state=asdict(replace(position, manifest_digest=digest)),
            )
            under_way = {} if position.step is None else {"step": position.step}
            self._client.record(
                "checkpoint",
                {
                    "path": str(directory.relative_to(self._spec.run_dir)),
                    "phase": position.phase,
                    "round": position.round,
                    "policy_version": position.policy_version,
                    "seconds": round(self._clock() - began, 3),
                    **under_way,
                },
            )
            prune(self._spec.checkpoints_dir, self._spec.num_checkpoints_kept, self._client.versions_to_keep())

        self._ranks.on_rank_0(on_rank_0)
        self.newest, self._written_at = position, self._clock()
        self._write_s = self._written_at - began
