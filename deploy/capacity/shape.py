"""Shape of a recipe's policy, before anything is created or loaded."""

from __future__ import annotations

from actors.run_config import RunConfig
from learner.model.checkpoint_files import has_adapter, load_config
from learner.model.config import TransformerConfig
from learner.model.hub import find_checkpoint


def policy_shape(recipe: RunConfig) -> TransformerConfig:
    """Return the shape of the recipe's checkpoint, or of a policy made from scratch, with `vocab_size` as upper bound.

    Raises ValueError if the checkpoint's config is not available.
    """
    model = recipe.model
    if model.checkpoint is not None:
        return load_config(find_checkpoint(model.checkpoint, config_only=True))
    return model.shape(model.vocab_size, recipe.longest_canvas, mask_token_id=0, eos_token_id=1)


def known_shape(recipe: RunConfig) -> TransformerConfig | None:
    """Return the policy's shape; None for an unusable checkpoint, which the preflight reports."""
    try:
        return policy_shape(recipe)
    except ValueError:
        return None


def num_adapters(recipe: RunConfig) -> int:
    """Count the adapters on the base of a sampling policy: its stage's, and SFT's if there is SFT; 0 without LoRA."""
    return 1 + (recipe.sft.num_steps > 0) if recipe.model.lora.rank else 0


def begins_merged(recipe: RunConfig) -> bool:
    """Whether a run starts from a checkpoint with an adapter, which is merged into float32 weights and written.

    Raises ValueError if the checkpoint's config is not available.
    """
    checkpoint = recipe.model.checkpoint
    return checkpoint is not None and has_adapter(find_checkpoint(checkpoint, config_only=True))
