"""DiffusionGemma policy: an encoder caches the finished slots, and a decoder denoises the canvas.

The network is transformers' own (`DiffusionGemmaForBlockDiffusion`, since 5.11), with which the family's checkpoints
are released; this module wraps it. Encoder and decoder share their weights. The encoder is causal; the decoder sees the
whole canvas and all finished slots (in its sliding layers, the last window of them). A step is conditioned on the
logits of the previous step (self-conditioning).

Shape letters: P finished slots, C slots of the canvas, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learner.model.renoising.config import MODEL_TYPE, RenoisingConfig, is_renoising, read_renoising_config

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

_VISION = ("vision_tower", "embed_vision")


class PrefixCache:
    """KV cache of the finished slots, which the decoder reads. Entries never change."""

    def __init__(self, cache: DynamicCache) -> None:
        """Start with an empty cache."""
        self.cache = cache
        self.num_slots = 0
        """P."""


class RenoisingPolicy(nn.Module):
    """Wrapper of transformers' network that computes the logits of one canvas behind a prefix."""

    def __init__(self, network: Any, config: RenoisingConfig) -> None:
        """Wrap transformers' network. Use `load_renoising_policy` to load one."""
        super().__init__()
        self.network, self.config = network, config

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def prefix(self) -> PrefixCache:
        """Make an empty prefix."""
        from transformers.cache_utils import DynamicCache

        return PrefixCache(DynamicCache(config=self.network.config.get_text_config(decoder=True)))

    def append(self, prefix: PrefixCache, ids: Tensor) -> None:
        """Append the finished slots [L] to a prefix."""
        positions = torch.arange(prefix.num_slots, prefix.num_slots + len(ids), device=ids.device)
        self.network.model.encoder(input_ids=ids[None], past_key_values=prefix.cache, position_ids=positions[None])
        prefix.num_slots += len(ids)

    def forward(self, prefix: PrefixCache, canvas: Tensor, conditioning: Tensor | None = None) -> Tensor:
        """Compute the float32 logits [C, V] of a canvas [C] behind a prefix.

        `conditioning` are the logits [C, V] of the previous step, divided by its temperature; None at the first step.
        """
        positions = torch.arange(prefix.num_slots, prefix.num_slots + len(canvas), device=canvas.device)
        answer = self.network(
            decoder_input_ids=canvas[None],
            past_key_values=prefix.cache,
            decoder_position_ids=positions[None],
            self_conditioning_logits=None if conditioning is None else conditioning[None].to(self._dtype),
        )
        logits: Tensor = answer.logits[0]
        return logits

    @property
    def _dtype(self) -> torch.dtype:
        weight: Tensor = self.network.model.decoder.embed_tokens.weight
        return weight.dtype


def load_renoising_policy(directory: Path, dtype: torch.dtype = torch.float32) -> RenoisingPolicy:
    """Load the policy of a checkpoint directory, on the CPU, without its vision tower: d1 processes text alone.

    No code of the checkpoint is run, and nothing is unpickled. Raises ValueError if it is of another family or
    incomplete.
    """
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.utils.logging import disable_progress_bar

    if not is_renoising(directory):
        raise ValueError(f"{directory} is no checkpoint of model_type {MODEL_TYPE!r}")
    network: Any
    found: dict[str, Any]
    # d1 prints its own progress.
    disable_progress_bar()
    try:
        # transformers' annotation omits the loading info.
        network, found = DiffusionGemmaForBlockDiffusion.from_pretrained(  # type: ignore[misc]
            directory, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    # With damaged files transformers raises exceptions of many classes.
    except Exception as error:
        raise ValueError(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error
    wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if wrong:
        raise ValueError(f"{directory} lacks {len(wrong)} tensors, or has them in other shapes: {sorted(wrong)[0]}")
    for name in _VISION:
        setattr(network.model.encoder, name, None)
    return RenoisingPolicy(network.eval().requires_grad_(requires_grad=False), read_renoising_config(directory))
