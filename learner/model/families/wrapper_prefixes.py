"""Removal of training wrappers' prefixes (DDP, FSDP, torch.compile) from tensor names."""

from __future__ import annotations

from collections.abc import Iterable

# Name parts that DistributedDataParallel and DeepSpeed, torch.compile, FSDP, and activation checkpointing insert.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ROTARY_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")


def plain_names(names: Iterable[str], norm: str) -> dict[str, str]:
    """Map names in a checkpoint to the family's own.

    Wrappers' name parts are removed, and so is a prefix before the names of a whole model. The outermost module's name
    is added if only the model inside it was saved.

    Args:
        names: the checkpoint's names.
        norm: the family's own name of the last norm, which each of its checkpoints has exactly once.
    """
    plain = {name: unwrapped(name) for name in names}
    found = set(plain.values())
    root, _, inner = norm.partition(".")
    around = [name.removesuffix(norm) for name in found if name.endswith(f".{norm}")]
    if norm not in found and len(around) == 1:
        return {name: of_ours.removeprefix(around[0]) for name, of_ours in plain.items()}
    if norm not in found and inner in found:
        outside = (f"{root}.", "lm_head.")
        return {
            name: of_ours if of_ours.startswith(outside) else f"{root}.{of_ours}" for name, of_ours in plain.items()
        }
    return plain


def unwrapped(name: str) -> str:
    """Remove the wrappers' parts from a name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_rotary_buffer(name: str) -> bool:
    """Whether a tensor holds rotary frequencies, which older versions of transformers saved with the weights."""
    return name.endswith(_ROTARY_BUFFERS)
