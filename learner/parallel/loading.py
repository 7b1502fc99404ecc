"""Sharded loading of a checkpoint: each rank reads its rows, and none holds the whole policy."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.networks import make_meta_model
from learner.model.storage.throughput import ReportProgress
from learner.model.storage.weights import StoredWeights
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig


def load_by_rows(
    directory: Path,
    mesh: DeviceMesh | None,
    config: ShardingConfig,
    *,
    device: torch.device,
    lora: LoraConfig = FULL_FINE_TUNING,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    report: ReportProgress | None = None,
) -> ShardedPolicy:
    """Load a checkpoint's policy, sharded over `mesh` on `device`; the arguments are `ShardedPolicy`'s.

    Its weights are held in `dtype`. Under LoRA that may be bfloat16; the adapter is in float32 anyway. `report`
    receives the read throughput. A rank takes memory for its shard and for small buffers. For layers in 4 bits it also
    takes a whole tensor or two.
    Raises ValueError if there is no checkpoint, or its weights do not fit its config.
    """
    weights = StoredWeights(directory)
    model = make_meta_model(weights.config).to(dtype)
    policy = ShardedPolicy(model, mesh, config, lora=lora, seed=seed, device=device)
    policy.load_full_weights(weights, report)
    return policy
