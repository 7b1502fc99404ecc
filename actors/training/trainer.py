"""Ray Train's trainer, without what d1 has no use for."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

# Ray's datasets: the data come from the coordinator. The cleaner frees the group's place after its controller died,
# which ends the run and with it the job, of which Ray frees all.
_UNUSED = (DatasetsCallback, PlacementGroupCleanerCallback)


class Trainer(TorchTrainer):
    """Starts no process for Ray's datasets and placement groups: each costs two seconds at a start of the group."""

    def _create_default_callbacks(self) -> list[Any]:
        # To mypy this is the trainer of before: which one it is, Ray decides as it is imported.
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        return [one for one in callbacks if not isinstance(one, _UNUSED)]
