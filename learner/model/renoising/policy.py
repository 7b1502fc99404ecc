"""DiffusionGemma: an encoder of what is finished, whose keys and values a decoder of the canvas reads.

The network is transformers' own (`DiffusionGemmaForBlockDiffusion`, since 5.11), which the family's checkpoints are
released with; here is how d1 asks it. One set of weights serves both: the encoder sees what is before a slot, the
decoder the whole canvas and all finished slots (the last window of them in its sliding layers). A step is conditioned
on the logits of the one before it.

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


class Prefix:
    """The finished slots, as the decoder reads them: keys and values, which never change."""

    def __init__(self, cache: DynamicCache) -> None:
        """Nothing yet."""
        self.cache = cache
        self.num_slots = 0
        """P."""


class RenoisingPolicy(nn.Module):
    """The network, asked by canvas."""

    def __init__(self, network: Any, config: RenoisingConfig) -> None:
        """Take transformers' network; `load_renoising_policy` does."""
        super().__init__()
        self.network, self.config = network, config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def prefix(self) -> Prefix:
        """An empty one."""
        from transformers.cache_utils import DynamicCache

        return Prefix(DynamicCache(config=self.network.config.get_text_config(decoder=True)))

    def finish(self, prefix: Prefix, ids: Tensor) -> None:
        """Append slots [L] that change no more."""
        positions = torch.arange(prefix.num_slots, prefix.num_slots + len(ids), device=ids.device)
        self.network.model.encoder(input_ids=ids[None], past_key_values=prefix.cache, position_ids=positions[None])
        prefix.num_slots += len(ids)

    def forward(self, prefix: Prefix, canvas: Tensor, conditioning: Tensor | None = None) -> Tensor:
        """Logits [C, V] in float32 of a canvas [C] behind what is finished.

        `conditioning` are the tempered logits [C, V] of the step before; None at the first.
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
    """The policy of a checkpoint directory, on the CPU. Its vision tower is left out: d1 asks about text.

    No code of the checkpoint is run, and nothing is unpickled. Raises ValueError where it is none, or not whole.
    """
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.utils.logging import disable_progress_bar

    if not is_renoising(directory):
        raise ValueError(f"{directory} is no checkpoint of model_type {MODEL_TYPE!r}")
    network: Any
    found: dict[str, Any]
    # Its bar of progress is no part of what is printed here.
    disable_progress_bar()
    try:
        # Its annotation knows the network alone.
        network, found = DiffusionGemmaForBlockDiffusion.from_pretrained(  # type: ignore[misc]
            directory, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    # Whatever the files are: transformers raises what its parts do.
    except Exception as error:
        raise ValueError(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error
    wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if wrong:
        raise ValueError(f"{directory} lacks {len(wrong)} tensors, or has them in other shapes: {sorted(wrong)[0]}")
    for name in _VISION:
        setattr(network.model.encoder, name, None)
    return RenoisingPolicy(network.eval().requires_grad_(requires_grad=False), read_renoising_config(directory))
