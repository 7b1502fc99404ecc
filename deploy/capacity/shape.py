"""The shape of a recipe's policy, before anything is made or loaded."""

from __future__ import annotations

from dataclasses import dataclass

from actors.run_config import RunConfig
from learner.model.checkpoint_files import has_adapter, load_config
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


def num_adapters(recipe: RunConfig) -> int:
    """Adapters beside the base where a policy samples: that of its stage, and before it SFT's; none without LoRA."""
    return 1 + (recipe.sft.num_steps > 0) if recipe.model.lora.rank else 0


def begins_merged(recipe: RunConfig) -> bool:
    """Whether a run starts from a checkpoint with an adapter: it is merged into float32 weights, which are written.

    Raises ValueError when the checkpoint's config cannot be had.
    """
    checkpoint = recipe.model.checkpoint
    return checkpoint is not None and has_adapter(find_checkpoint(checkpoint, config_only=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Numbers of a policy's parameters, by where they are."""

    block: int
    """Of one block, the largest."""
    blocks: int
    """Of all blocks."""
    root: int
    """Of the embedding, the last norm and the head."""
    frozen: int
    """Of those of the blocks, what is never trained: the biases of routers."""
    adapter: int
    """Of LoRA's matrices, over all blocks; 0 without."""
    adapter_of_block: int
    """Of LoRA's matrices in one block, the most."""
    layer: int
    """Of the largest linear layer of a block."""

    @property
    def policy(self) -> int:
        """Of the policy without an adapter."""
        return self.blocks + self.root

    @property
    def trained(self) -> int:
        """Of what an optimizer moves."""
        return self.adapter or self.policy - self.frozen

    @classmethod
    def of(cls, shape: TransformerConfig, lora: LoraConfig) -> ParameterCounts:
        """Those of a shape."""
        layers = range(shape.num_layers)
        frozen = [moe.num_experts * moe.has_bias if (moe := shape.experts_of(layer)) else 0 for layer in layers]
        blocks = [_trained_of_block(shape, layer) + frozen[layer] for layer in layers]
        adapters = [
            lora.rank * sum(sum(size) for name, size in shape.linear_layers(layer).items() if name in lora.targets)
            for layer in layers
        ]
        matrices = 1 if shape.tied_embeddings else 2
        return cls(
            block=max(blocks),
            blocks=sum(blocks),
            root=matrices * shape.vocab_size * shape.d_model + shape.d_model,
            frozen=sum(frozen),
            adapter=sum(adapters),
            adapter_of_block=max(adapters),
            layer=max(inputs * outputs for layer in layers for inputs, outputs in shape.linear_layers(layer).values()),
        )


def _trained_of_block(shape: TransformerConfig, layer: int) -> int:
    sizes, moe = shape.linear_layers(layer), shape.experts_of(layer)
    biases = sum(sizes[name][1] for name in ("q_proj", "k_proj", "v_proj")) * shape.qkv_bias
    norms = 2 * shape.d_model + 2 * shape.head_dim * shape.qk_norm
    experts = 0 if moe is None else moe.num_parameters(shape.d_model)
    return sum(inputs * outputs for inputs, outputs in sizes.values()) + experts + biases + norms
