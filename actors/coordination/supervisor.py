"""Supervision of a run's actors: the progress of the learner's ranks, and the end of actors that hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import ray

from actors.coordination.liveness import LivenessMonitor
from actors.coordination.pools import Pools
from actors.coordination.rank_progress import RankProgress, stuck, stuck_text
from actors.spec import RunSpec
from learner.parallel.progress import Place

# Longer than for other actors: it does not answer while it starts or ends a group.
_CONTROLLER_HUNG_S = 90.0
_RANK, _CONTROLLER, _STORE = "learner rank ", "Ray Train's controller", "the weight store"


class Supervisor:
    """Ends what hangs: pool actors, the weight store, the learner's ranks, and Ray Train's controller."""

    def __init__(
        self,
        pools: Pools,
        store: Any,
        on_failure: Callable[[str, int], None],
        *,
        room_timeout_s: float = 0.0,
        min_ranks: int = 1,
    ) -> None:
        """Take over pools and weight store. `on_failure` receives which actor is ended.

        Args:
            pools: the pools.
            store: the weight store.
            on_failure: see above.
            room_timeout_s: how long Ray Train's controller waits for resources, without answering meanwhile, before
                the learner group shrinks. 0: it does not shrink.
            min_ranks: its smallest size.
        """
        self._pools, self._store, self._on_failure = pools, store, on_failure
        self._room_timeout_s, self._min_ranks, self._has_made_room = room_timeout_s, min_ranks, False
        self._controller_hung_s = _CONTROLLER_HUNG_S + room_timeout_s
        self.liveness = LivenessMonitor(self._end_hung)
        self.ranks: dict[int, RankProgress] = {}
        """Progress of each rank of the learner, by rank."""
        self._is_ending = False

    @classmethod
    def for_run(cls, spec: RunSpec, pools: Pools, store: Any, on_failure: Callable[[str, int], None]) -> Self:
        """Supervise a run, with what its recipe says about the size of the learner group."""
        sizes = spec.learner_sizes
        room_timeout_s = spec.learner.resource_timeout_s if len(sizes) > 1 else 0.0
        return cls(pools, store, on_failure, room_timeout_s=room_timeout_s, min_ranks=sizes[-1])

    def sweep(self) -> None:
        """Probe new actors of the pools, and end hung ones. To be called as `LivenessMonitor.sweep`."""
        for name, actor in {**self._pools.members(), _STORE: self._store}.items():
            if not self.liveness.is_watched(name):
                self.liveness.probe(name, actor)
        self.liveness.sweep()
        self._end_stuck()
        self._make_room()

    def heartbeat(self, rank: int, place: Place, actor: Any, node: str, controller: Any = None) -> None:
        """Register a heartbeat of a learner rank; rank 0 passes Ray Train's controller."""
        if controller is not None and not self.liveness.is_watched(_CONTROLLER):
            # It is up, as it has started this rank: if it never answers, it hangs.
            self.liveness.probe(_CONTROLLER, controller, _controller_answers, self._controller_hung_s, is_up=True)
        now = time.monotonic()
        if (progress := self.ranks.get(rank)) is None:
            progress = RankProgress(rank=rank, actor=actor, node=node, place=place, heard_at=now, activity_since=now)
            self.ranks[rank] = progress
        progress.hear(actor, node, place, now)
        self.liveness.record_heartbeat(f"{_RANK}{rank}", actor)

    @property
    def is_learner_down(self) -> bool:
        """Whether no rank of the learner is heard from."""
        silent = self.liveness.silent()
        return all(f"{_RANK}{rank}" in silent or not self.liveness.is_watched(f"{_RANK}{rank}") for rank in self.ranks)

    def rank_ended(self, rank: int) -> None:
        """Register that a rank has ended normally."""
        self.liveness.forget(f"{_RANK}{rank}")
        self.ranks.pop(rank, None)

    def learner_starting(self) -> None:
        """Forget the ranks of the previous learner group."""
        # The controller starts another group, and does not answer until that is up.
        self.liveness.forget(_CONTROLLER, *(f"{_RANK}{rank}" for rank in self.ranks))
        self.ranks.clear()
        self._is_ending = False

    def _end_hung(self, name: str, actor: Any, seconds: float) -> None:
        is_rank, fate = name.startswith(_RANK), "is replaced"
        if name == _CONTROLLER:
            # Ranks would train on under it, but their end or death would go unnoticed.
            fate = "is ended, and `d1 train` with it"
            if any(silent.startswith(_RANK) for silent in self.liveness.silent()):
                return  # It may be busy replacing a rank.
        where = ""
        if is_rank:
            progress = self.ranks[int(name.removeprefix(_RANK))]
            where, self._is_ending = f" on {progress.node}, last heard of in {progress.place},", True
        self._on_failure(f"{name}{where} was silent for {seconds:.0f} s and {fate}", 1)
        if is_rank:
            self.liveness.forget(name, _CONTROLLER)
        # Ray Train restarts its workers itself, and nothing restarts its controller.
        ray.kill(actor, no_restart=is_rank or name == _CONTROLLER)

    def _end_stuck(self) -> None:
        """End the ranks that have stopped advancing, which makes Ray Train restart the group."""
        ended = [] if self._is_ending else stuck(self.ranks.values())
        if not ended:
            return
        # The others fail or are ended next.
        self._end(ended, f"{stuck_text(ended, self.ranks.values())}; the group is restarted")

    def _make_room(self) -> None:
        """Restart a learner group that may shrink, once, if a pool has had no actor for as long as the group may wait.

        After the loss of a machine the group may have taken the last room, and would wait for that pool for ever. Ray
        places an actor that is pending already before the new group.
        """
        kind, outage_s = self._pools.longest_outage()
        if not self._room_timeout_s or outage_s <= self._room_timeout_s:
            self._has_made_room = False
        elif not self._has_made_room and not self._is_ending and len(self.ranks) > self._min_ranks:
            self._has_made_room = True
            what = f"no {kind} has been up for {outage_s:.0f} s: the learner group is restarted, to leave room for one"
            self._end(list(self.ranks.values()), what)

    def _end(self, ranks: list[RankProgress], what: str) -> None:
        """End some ranks, and report why."""
        self._is_ending = True
        self._on_failure(what, 1)
        self.liveness.forget(_CONTROLLER, *(f"{_RANK}{one.rank}" for one in ranks))
        for one in ranks:
            ray.kill(one.actor, no_restart=True)


async def _controller_answers(controller: Any) -> None:
    """Probe Ray Train's controller with an arbitrary call. Raises RayError."""
    await controller.get_training_failed_error.options(max_task_retries=0).remote()
