"""LoRA adapters on disk: `lora.safetensors` of a checkpoint, and reading and writing of peft directories.

A checkpoint of a LoRA run holds `lora.safetensors`, which names its base checkpoint. The base may have an adapter
itself, as each stage of a run trains one. The last checkpoint of the chain has the weights.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner.model.checkpoint_files import ADAPTER, ADAPTER_METADATA_KEY, checkpoint_chain, load_config
from learner.model.config import Family
from learner.model.families import FAMILIES, FamilyFormat
from learner.model.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from learner.model.lora import adapter_names, set_adapter, set_start_adapter
from learner.model.lora_config import BaseWeights
from learner.model.peft_directory.config import find_base, is_peft
from learner.model.peft_directory.matrices import check_copies, read_matrices
from learner.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter: its matrices, their scaling, and the base that they were trained on."""

    rank: int
    """Rows of each A and columns of each B."""
    alpha: float
    """B A is multiplied by `alpha / rank`."""
    base: str
    """The base checkpoint: the name of a sibling directory, or, for a peft adapter, a path."""
    matrices: Mapping[str, Tensor]
    """By plain name: `.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs, rank] of each layer."""
    base_digest: str | None = None
    """The `chain_digest` of the base when the adapter was trained; None in files of an earlier d1."""
    base_weights: BaseWeights = "full"
    """Format of the frozen weights in training: `nf4` means rounded to 4 bits."""

    @property
    def scaling(self) -> float:
        """Multiplier of B A."""
        return self.alpha / self.rank


def write_adapter(directory: Path, adapter: Adapter) -> None:
    """Write `lora.safetensors` into a checkpoint's directory."""
    # One key: safetensors writes several in arbitrary order, and equal adapters must give bit-identical files.
    about = {name: getattr(adapter, name) for name in ("rank", "alpha", "base", "base_digest", "base_weights")}
    metadata = {ADAPTER_METADATA_KEY: json.dumps(about)}
    save_file({name: tensor.contiguous() for name, tensor in adapter.matrices.items()}, directory / ADAPTER, metadata)


def read_adapter(directory: Path) -> Adapter:
    """Read the adapter of a checkpoint's or a peft directory. Raises ValueError if there is none or it is damaged."""
    if is_peft(directory):
        found = read_matrices(directory, load_config(directory))
        base = str(find_base(directory))
        return Adapter(rank=found.rank, alpha=found.scaling * found.rank, base=base, matrices=found.matrices)
    path = directory / ADAPTER
    if not path.is_file():
        raise ValueError(f"{directory} has no adapter: it has no {ADAPTER}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[ADAPTER_METADATA_KEY])
            matrices = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        return Adapter(matrices=matrices, **about)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no adapter that d1 wrote: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterChain:
    """Parts of a checkpoint's policy: the frozen weights, and the adapters of the stages trained on them."""

    weights: Path
    """The checkpoint that has the weights."""
    start: Adapter | None
    """The sum of all adapters but the last; None if there are none."""
    adapter: Adapter | None
    """The last stage's adapter; None for a policy without adapters."""

    @property
    def combined(self) -> Adapter | None:
        """The sum of all adapters; None if there are none."""
        return combine_adapters([one for one in (self.adapter, self.start) if one is not None])


def attach_adapters(model: Transformer, matrices: Mapping[str, Tensor], scaling: float, start: Adapter | None) -> None:
    """Set the adapter and the `start` adapter of a policy for inference.

    Works in place, on the policy's device and in its precision. Raises ValueError if they do not fit the policy.
    """
    set_adapter(model, matrices, scaling)
    frozen, weight = (({}, 0.0) if start is None else (start.matrices, start.scaling)), model.embed.weight
    set_start_adapter(model, *frozen, weight.device, weight.dtype)


def read_chain(directory: Path) -> AdapterChain:
    """Read the adapters of a checkpoint and find its weights. Raises ValueError if a part is missing or damaged."""
    *adapted, weights = checkpoint_chain(directory)
    adapters = [read_adapter(one) for one in adapted]
    if any(map(is_peft, adapted)):
        # Unlike the adapters of a run's stages, peft adapters may have different layers.
        return AdapterChain(weights=weights, start=None, adapter=combine_adapters(adapters))
    return AdapterChain(
        weights=weights, start=combine_adapters(adapters[1:]), adapter=adapters[0] if adapters else None
    )


def check_peft_copies(directory: Path, base: Mapping[str, Any]) -> None:
    """Run `check_copies` for each peft adapter of a checkpoint."""
    for adapted in filter(is_peft, checkpoint_chain(directory)[:-1]):
        check_copies(adapted, load_config(adapted), base)


def combine_adapters(adapters: Sequence[Adapter]) -> Adapter | None:
    """Combine the adapters of several stages, the latest first, into one; None for an empty sequence.

    B1 A1 + B2 A2 is [B1 B2] [A1; A2]: the ranks add up. Differences in scaling are multiplied into B. A layer that an
    adapter does not have is padded with zeros.
    """
    if len(adapters) < 2:
        return adapters[0] if adapters else None
    first, rank = adapters[0], sum(adapter.rank for adapter in adapters)
    alpha = first.scaling * rank
    # peft adapters may have an alpha of 0, by which the others' scalings cannot be divided.
    scaling = first.scaling if alpha and alpha.is_integer() else 1.0
    matrices = {}
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.matrices):
        having = [adapter for adapter in adapters if name in adapter.matrices]
        padding = rank - sum(adapter.rank for adapter in having)
        if ".lora_A." in name:
            whole = torch.cat([adapter.matrices[name] for adapter in having])
            matrices[name] = F.pad(whole, (0, 0, 0, padding))
        else:
            parts = [adapter.matrices[name] * (adapter.scaling / scaling) for adapter in having]
            matrices[name] = F.pad(torch.cat(parts, dim=1), (0, padding))
    last = adapters[-1]
    return replace(
        first,
        rank=rank,
        alpha=round(scaling * rank),
        base=last.base,
        base_weights=last.base_weights,
        matrices=matrices,
    )


def _check_layers(layers: Sequence[str], names: FamilyFormat) -> None:
    """Raise ValueError that names a layer which is a part of a fused layer of the original model."""
    counts = Counter(names.block_names.values())
    for layer in layers:
        ours = _inner(layer)
        if counts[names.block_names[ours]] > 1:
            raise ValueError(
                f"{ours.rpartition('.')[2]} is a part of {names.block_names[ours]} in the original code of "
                f"{names.model_type}, and peft adapts that whole; export the policy with its adapter merged"
            )


def _inner(layer: str) -> str:
    """Return the name of a block's layer inside the block."""
    return layer.split(".", 2)[2]


def write_peft_adapter(directory: Path, adapter: Adapter, family: Family, base: str) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained(original_model, directory)` reads.

    Args:
        directory: existing directory for `adapter_config.json` and `adapter_model.safetensors`.
        adapter: an adapter whose base is the original model itself.
        family: the family whose original names are written.
        base: the base that `adapter_config.json` names, a path or a hub id.

    Raises ValueError if the original model fuses several of our layers into one.
    """
    names = FAMILIES[family]
    layers = sorted({name.rpartition(".lora_")[0] for name in adapter.matrices})
    outer = [layer for layer in layers if f"{layer}.weight" in names.outer_names]
    of_blocks = [layer for layer in layers if layer not in outer]
    _check_layers(of_blocks, names)
    # Anchored to whole names: LLaDA's head has the same name as a layer of its blocks.
    inner = sorted({names.block_names[_inner(layer)] for layer in of_blocks})
    pattern = rf"{re.escape(names.block_prefix)}\.\d+\.({'|'.join(map(re.escape, inner))})"
    for layer in outer:
        pattern += "|" + re.escape(names.outer_names[f"{layer}.weight"].removesuffix(".weight"))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": pattern,
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for layer in layers:
        weight = f"{layer}.weight"
        for ours, theirs in zip(adapter_names(weight), adapter_names(names.checkpoint_name(weight)), strict=True):
            tensors[f"base_model.model.{theirs}"] = adapter.matrices[ours].contiguous()
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
