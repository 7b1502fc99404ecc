"""Configuration of the learner's sharding: a recipe's section `sharding`.

A separate module, because FSDP takes long to import, and most processes that read a recipe shard nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig

MAX_LOCAL_GRADIENT_BYTES = 2 * 10**9
"""Largest gradient of full fine-tuning that each worker holds whole: of 500 million parameters."""


class ShardingConfig(BaseModel):
    """How the learner's workers hold the policy and compute with it, in both stages. The defaults suit CPUs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    workers_per_copy: NonNegativeInt = 0
    """Workers that one copy of the policy is sharded over; 0: all. It must divide `learner.num_workers`. Weights are
    gathered within a copy, and only gradients are reduced across copies. With as many as a machine has, no weights
    travel between machines, at the cost of more memory on each worker."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations in forward and backward; bfloat16 is mixed precision. Trained weights are
    stored and stepped, and gradients are reduced over workers, in float32 in any case."""
    activation_checkpointing: bool = False
    """Keep only the input of each block, and recompute the rest in the backward pass: less memory, the same gradients,
    about a third more time."""
    compile: Literal[False, True, "elementwise"] = False
    """Compile the forward and backward of each block (torch.compile). All blocks share a few graphs, for micro-batches
    of any size. The first steps take minutes. Experts need `compute_dtype: bfloat16`, and `model.lora.base_weights:
    nf4` needs `activation_checkpointing`. `elementwise`: only norms, rotary positions and SwiGLUs, each to one kernel,
    in seconds and without these conditions."""
    cpu_offload: bool = False
    """Keep weights and AdamW's moments in host memory, and step there. Only with `device: cuda`."""

    @property
    def compiles_blocks(self) -> bool:
        """Whether whole blocks are compiled, for padded micro-batches."""
        return self.compile is True

    def sums_locally(self, num_trained: int, lora: LoraConfig, num_workers: int) -> bool:
        """Whether workers sum the gradients of an optimizer step's micro-batches before they reduce them, once.

        The sum is not sharded: it takes 4 bytes per trained parameter on each worker. So it is for an adapter, and for
        gradients of at most `MAX_LOCAL_GRADIENT_BYTES`. Larger ones are reduced after each micro-batch, but over copies
        of the policy (`workers_per_copy`) only once.
        """
        return num_workers > 1 and (bool(lora.rank) or 4 * num_trained <= MAX_LOCAL_GRADIENT_BYTES)

    def incompatibility(self, policy: TransformerConfig, lora: LoraConfig) -> str | None:
        """Return why a policy cannot be compiled with these settings; None if it can, or its blocks are not."""
        if not self.compiles_blocks:
            return None
        if policy.moe is not None and self.compute_dtype == "float32":
            return (
                "sharding.compile is true, and experts are compiled in bfloat16 only; "
                "take sharding.compute_dtype=bfloat16"
            )
        if lora.base_weights == "nf4" and not self.activation_checkpointing:
            # The compiler reuses the forward's dequantised weights in the backward pass, and so keeps them in memory.
            return (
                "sharding.compile is true, and compiled blocks keep what 4 bits stand for until their backward pass; "
                "take sharding.activation_checkpointing=true, or model.lora.base_weights=full"
            )
        return None
