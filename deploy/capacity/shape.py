"""The shape of a recipe's policy, before anything is made or loaded."""

from __future__ import annotations

from dataclasses import dataclass

from actors.run_config import RunConfig
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.hub import find_checkpoint
from learner.model.lora_config import LoraConfig


def policy_shape(recipe: RunConfig) -> TransformerConfig:
    """That of its checkpoint; or of a policy made from scratch, whose tokenizer has at most so many tokens.

    Raises ValueError when the checkpoint's config cannot be had.
    """
    model = recipe.model
    if model.checkpoint is not None:
        return load_config(find_checkpoint(model.checkpoint, config_only=True))
    return model.shape(model.vocab_size, recipe.longest_canvas, mask_token_id=0, eos_token_id=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Numbers of a policy's parameters, by where they are."""

    block: int
    """Of one block."""
    blocks: int
    """Of all blocks."""
    root: int
    """Of the embedding, the last norm and the head."""
    adapter: int
    """Of LoRA's matrices, over all blocks; 0 without."""

    @property
    def policy(self) -> int:
        """Of the policy without an adapter."""
        return self.blocks + self.root

    @property
    def adapter_of_block(self) -> int:
        """Of LoRA's matrices in one block."""
        return self.adapter * self.block // self.blocks

    @classmethod
    def of(cls, shape: TransformerConfig, lora: LoraConfig) -> ParameterCounts:
        """Those of a shape."""
        width = shape.d_model
        sizes = shape.linear_layers
        biases = sum(sizes[name][1] for name in ("q_proj", "k_proj", "v_proj")) * shape.qkv_bias
        block = sum(inputs * outputs for inputs, outputs in sizes.values()) + biases + 2 * width
        block += 2 * shape.head_dim * shape.qk_norm
        adapter = lora.rank * sum(sum(sizes[target]) for target in lora.targets)
        matrices = 1 if shape.tied_embeddings else 2
        return cls(
            block=block,
            blocks=shape.num_layers * block,
            root=matrices * shape.vocab_size * width + width,
            adapter=shape.num_layers * adapter,
        )
