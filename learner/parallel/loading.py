"""Loading a checkpoint onto ranks: each reads its own rows, and the whole policy never is in the memory of any."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from learner.model.lora_config import WHOLE, LoraConfig
from learner.model.networks import make_on_meta
from learner.model.storage.throughput import Say
from learner.model.storage.weights import StoredWeights
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig


def load_by_rows(
    directory: Path,
    mesh: DeviceMesh | None,
    config: ShardingConfig,
    *,
    device: torch.device,
    lora: LoraConfig = WHOLE,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    say: Say | None = None,
) -> ShardedPolicy:
    """A checkpoint's policy, sharded over `mesh` on `device`; the arguments are `ShardedPolicy`'s.

    Its weights are held in `dtype`; under LoRA that may be bfloat16, and the adapter is in float32 all the same.
    `say` is told at which rate they are read. A rank takes memory for its shard, and for small buffers; of layers that
    it holds in 4 bits, for these and for a whole tensor or two.
    Raises ValueError where there is no checkpoint, or its weights do not fit its config.
    """
    weights = StoredWeights(directory)
    model = make_on_meta(weights.config).to(dtype)
    policy = ShardedPolicy(model, mesh, config, lora=lora, seed=seed, device=device)
    policy.load_full_weights(weights, say)
    return policy
