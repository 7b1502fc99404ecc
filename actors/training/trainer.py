"""Ray Train's trainer, without what d1 has no use for."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback


class Trainer(TorchTrainer):
    """Starts no process for Ray's datasets, at each start of the group: data come from the coordinator."""

    def _create_default_callbacks(self) -> list[Any]:
        # To mypy this is the trainer of before: which one it is, Ray decides as it is imported.
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        return [one for one in callbacks if not isinstance(one, DatasetsCallback)]
