"""`d1` with a slow disk: the coordinator's fsync takes two seconds, and the coordinator is killed once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import actors.cluster
from actors.coordination.coordinator import Coordinator
from actors.messages import Next, TrainedRound, WeightsId
from deploy.cli import main

_FSYNC_S = 2.0
_KILLED_IN_ROUND = 1


class SlowDiskCoordinator(Coordinator):
    """A coordinator with a slow disk, which dies after the learner has asked for a round."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        fsync = os.fsync

        def slow(file: int) -> None:
            time.sleep(_FSYNC_S)
            fsync(file)

        os.fsync = slow
        super().__init__(*arguments, **options)

    async def next_batch(
        self, round_index: int, weights_id: WeightsId, trained: TrainedRound | None = None, label: str = ""
    ) -> tuple[Next, list[Any]]:
        if round_index == _KILLED_IN_ROUND and not self._history.is_restarted:
            asyncio.get_running_loop().call_later(_FSYNC_S / 2, os.kill, os.getpid(), signal.SIGKILL)
        return await super().next_batch(round_index, weights_id, trained, label)


if __name__ == "__main__":
    actors.cluster.Coordinator = SlowDiskCoordinator
    sys.argv[0] = "d1"
    main()
