"""Ray Train's trainer without the callbacks that d1 does not use."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

# Private: Ray has no setting that leaves these out, and no other names for them.
# Ray's datasets are not needed: the data come from the coordinator. The cleaner frees the placement group after its
# controller died, which ends the run and its job, whose resources Ray frees anyway.
_UNUSED = (DatasetsCallback, PlacementGroupCleanerCallback)


class Trainer(TorchTrainer):
    """TorchTrainer without processes for Ray's datasets and placement groups: each costs two seconds per start of the
    group."""

    def _create_default_callbacks(self) -> list[Any]:
        # mypy sees the previous version of the trainer: Ray chooses the version on import.
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        return [one for one in callbacks if not isinstance(one, _UNUSED)]
