"""How the learner's workers are sharded, as a recipe says it. By itself: FSDP takes long to import, and most processes
that read a recipe shard nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig


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
    compile: bool = False
    """Compile each block, forward and backward (torch.compile): all blocks share a few graphs, for micro-batches of any
    size. The first steps take minutes. Experts need `compute_dtype: bfloat16`, and `model.lora.base_weights: nf4` needs
    `activation_checkpointing`."""
    cpu_offload: bool = False
    """Keep weights and AdamW's moments in main memory, and step there. Only with `device: cuda`."""

    def refusal(self, policy: TransformerConfig, lora: LoraConfig) -> str | None:
        """Why a policy cannot be compiled so; None where it can, or is not to be."""
        if not self.compile:
            return None
        if policy.moe is not None and self.compute_dtype == "float32":
            return (
                "sharding.compile is true, and experts are compiled in bfloat16 only; "
                "take sharding.compute_dtype=bfloat16"
            )
        if lora.base_weights == "nf4" and not self.activation_checkpointing:
            # The compiler finds the weights in the backward pass to be those of the forward, and keeps them.
            return (
                "sharding.compile is true, and compiled blocks keep what 4 bits stand for until their backward pass; "
                "take sharding.activation_checkpointing=true, or model.lora.base_weights=full"
            )
        return None
