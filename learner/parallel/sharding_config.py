"""How the learner's workers are sharded, as a recipe says it. By itself: FSDP takes long to import, and most processes
that read a recipe shard nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt


class ShardingConfig(BaseModel):
    """How the learner's workers hold the policy and compute with it, in both stages. The defaults suit CPUs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    workers_per_copy: NonNegativeInt = 0
    """Workers that one copy of the policy is sharded over; 0: all of them. It divides `learner.num_workers`. Weights
    are gathered within a copy, and only gradients go from copy to copy: with as many as a machine has, no weights
    travel between machines, for more memory on each worker."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations in forward and backward. Weights are kept and stepped, and gradients summed over the
    workers, in float32 in any case."""
    activation_checkpointing: bool = False
    """Keep of each block only its input, and compute the rest again in the backward pass: less memory, the same
    gradients, about a third more time."""
    cpu_offload: bool = False
    """Keep weights and AdamW's moments in main memory, and step there. Only with `device: cuda`."""
