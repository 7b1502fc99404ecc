"""Shape and parameter counts of a recipe's policy, before anything is created or loaded."""

from __future__ import annotations

from dataclasses import dataclass

from actors.run_config import RunConfig
from learner.model.checkpoint_files import has_adapter, load_config
from learner.model.config import TransformerConfig
from learner.model.hub import find_checkpoint
from learner.model.lora_config import LoraConfig


def policy_shape(recipe: RunConfig) -> TransformerConfig:
    """Return the shape of the recipe's checkpoint, or of a policy made from scratch, with `vocab_size` as upper bound.

    Raises ValueError if the checkpoint's config is not available.
    """
    model = recipe.model
    if model.checkpoint is not None:
        return load_config(find_checkpoint(model.checkpoint, config_only=True))
    return model.shape(model.vocab_size, recipe.longest_canvas, mask_token_id=0, eos_token_id=1)


def num_adapters(recipe: RunConfig) -> int:
    """Count the adapters on the base of a sampling policy: its stage's, and SFT's if there is SFT; 0 without LoRA."""
    return 1 + (recipe.sft.num_steps > 0) if recipe.model.lora.rank else 0


def begins_merged(recipe: RunConfig) -> bool:
    """Whether a run starts from a checkpoint with an adapter, which is merged into float32 weights and written.

    Raises ValueError if the checkpoint's config is not available.
    """
    checkpoint = recipe.model.checkpoint
    return checkpoint is not None and has_adapter(find_checkpoint(checkpoint, config_only=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameter counts of a policy, by location."""

    block: int
    """The largest block."""
    blocks: int
    """All blocks."""
    root: int
    """The embedding, the final norm and the head."""
    frozen: int
    """The part of the blocks that is never trained: the biases of routers."""
    adapter: int
    """LoRA's matrices over all blocks; 0 without LoRA."""
    adapter_of_block: int
    """LoRA's matrices in one block, at most."""
    layer: int
    """The largest linear layer of a block."""

    @property
    def policy(self) -> int:
        """Number of parameters of the policy without an adapter."""
        return self.blocks + self.root

    @property
    def trained(self) -> int:
        """Number of parameters that the optimizer updates."""
        return self.adapter or self.policy - self.frozen

    @classmethod
    def of(cls, shape: TransformerConfig, lora: LoraConfig) -> ParameterCounts:
        """Count the parameters of a shape."""
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
