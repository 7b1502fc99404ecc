"""LoRA matrices of a peft directory under our names; fused layers are split into ours.

Shape letters: I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.families.layout import Layout
from learner.model.families.wrapper_prefixes import unwrapped
from learner.model.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from learner.model.lora import adaptable_layers, adapter_names
from learner.model.networks import make_meta_model
from learner.model.peft_directory.config import PeftAdapterConfig

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# peft omits the adapter's name, other tools keep it.
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
# peft also saves the frozen weights of the embedding and the head, if they are adapted or may have been resized.
_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)?\.weight")
_WEIGHT = ".weight"
# Names in a model that was loaded without its head lack this prefix.
_OPTIONAL_PREFIX = "model."


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftMatrices:
    """The matrices of all layers, at one rank and one scaling."""

    rank: int
    """R: the highest of the layers' ranks; lower ones are padded with zeros."""
    scaling: float
    """Multiplier of B A. If the layers' scalings differ, it is 1 and they are multiplied into B."""
    matrices: dict[str, Tensor]
    """In float32, by our names: `.lora_A.weight` [R, I] and `.lora_B.weight` [O, R] of each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """The matrices of one of the original model's layers."""

    module: str
    """The layer's name in the file."""
    down: Tensor
    """[R, I], A."""
    up: Tensor
    """[O, R], B."""
    scaling: float
    """Multiplier of B A."""


def read_matrices(directory: Path, shape: TransformerConfig) -> PeftMatrices:
    """Read the matrices of a peft directory for a base of that shape.

    Raises ValueError that names the tensor or layer which is missing, does not fit, or has no counterpart in d1.
    """
    config = PeftAdapterConfig.read(directory)
    model = make_meta_model(shape)
    layout = FAMILIES[shape.family].layout({name: held.shape for name, held in model.named_parameters()})
    adaptable = {f"{name}{_WEIGHT}" for name in (*adaptable_layers(model), "head")}
    pairs = _pairs(directory / ADAPTER_WEIGHTS, config, layout, _outer_names(shape))
    for stored, pair in pairs.items():
        if not all(piece.ours in adaptable for piece in layout.of_stored[stored]):
            raise ValueError(
                f"{directory / ADAPTER_WEIGHTS} adapts {pair.module}, which can have no adapter in d1; it reads "
                "adapters of attention, dense layers, shared experts and the head"
            )
    _check_targets(directory, config, pairs, layout, adaptable)
    rank = max(pair.down.shape[0] for pair in pairs.values())
    scalings = {pair.scaling for pair in pairs.values()}
    scaling = scalings.pop() if len(scalings) == 1 else 1.0
    matrices = {}
    for stored, pair in pairs.items():
        padding = rank - pair.down.shape[0]
        a_RI = F.pad(pair.down, (0, 0, 0, padding))
        # Only differing scalings are multiplied into B.
        b_OR = F.pad(pair.up if pair.scaling == scaling else pair.up * pair.scaling, (0, padding))
        for piece in layout.of_stored[stored]:
            a, b = adapter_names(piece.ours)
            # Parts of a fused layer share its A, and each has its own rows of B.
            matrices[a] = a_RI
            matrices[b] = b_OR[piece.stored_begin : piece.stored_begin + piece.num_rows]
    return PeftMatrices(rank=rank, scaling=scaling, matrices=matrices)


def check_copies(directory: Path, shape: TransformerConfig, base: Mapping[str, Any]) -> None:
    """Check that copies of the embedding and the head in a peft directory equal the base's.

    Args:
        directory: the adapter's directory.
        shape: the base's config.
        base: the base's weights by our names, sliceable by rows; a copy may be in another precision.

    Raises ValueError that names a tensor which differs: peft would compute another policy with it.
    """
    path, outer_names = directory / ADAPTER_WEIGHTS, _outer_names(shape)
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            if (ours := _copied(name, outer_names)) is None:
                continue
            copy, original = file.get_tensor(name), base[ours][:]
            rounded = original.to(copy.dtype).to(original.dtype)
            if copy.shape != original.shape or not torch.equal(copy.to(original.dtype), rounded):
                raise ValueError(
                    f"{path} has {name}, which is not that of the base; d1 reads adapters of lora_A and lora_B only"
                )


def _outer_names(shape: TransformerConfig) -> dict[str, str]:
    """Map the base's names of the embedding and the head to ours."""
    names = FAMILIES[shape.family].outer_names
    head = "embed.weight" if shape.tied_embeddings else "head.weight"
    return {names["embed.weight"]: "embed.weight", names["head.weight"]: head}


def _copied(name: str, outer_names: Mapping[str, str]) -> str | None:
    """Return our name of the base's tensor that a tensor of the file copies; None for a matrix of the adapter."""
    match = _COPY.fullmatch(unwrapped(name))
    names = () if match is None else _stored_names(match["module"])
    return next((outer_names[stored] for stored in names if stored in outer_names), None)


def _pairs(path: Path, config: PeftAdapterConfig, layout: Layout, outer_names: Mapping[str, str]) -> dict[str, _Pair]:
    """Read A and B of each adapted layer, by the name of the base's weight."""
    pairs: dict[str, _Pair] = {}
    for module, matrices in _by_module(path, outer_names).items():
        stored = next((name for name in _stored_names(module) if name in layout.stored_shapes), None)
        if stored is None or stored in pairs:
            what = "the base has no such layer" if stored is None else f"{pairs[stored].module} is the same layer"
            raise ValueError(f"{path} adapts {module}, and {what}")
        rank, shape = config.rank_of(module), layout.stored_shapes[stored]
        for which, expected in (("A", [rank, shape[-1]]), ("B", [shape[0], rank])):
            if which not in matrices:
                raise ValueError(f"{path} has no lora_{which} of {module}")
            if list(matrices[which].shape) != expected:
                raise ValueError(
                    f"{path}: lora_{which} of {module} is {list(matrices[which].shape)}; the base and {ADAPTER_CONFIG} "
                    f"make it {expected}"
                )
        scaling = config.scaling_of(module)
        pairs[stored] = _Pair(module=module, down=matrices["A"], up=matrices["B"], scaling=scaling)
    return pairs


def _by_module(path: Path, outer_names: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
    """Read the file's A and B matrices, by the module's name in the file."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(path, outer_names).items():
        match = _NAME.fullmatch(unwrapped(name))
        if match is None:
            raise ValueError(f"{path} has {name}; d1 reads lora_A and lora_B of linear layers only")
        of_module = found.setdefault(match["module"], {})
        if match["which"] in of_module:
            raise ValueError(
                f"{path} has lora_{match['which']} of {match['module']} twice; save each adapter by itself"
            )
        of_module[match["which"]] = tensor
    if not found:
        raise ValueError(f"{path} is empty: it has no lora_A and lora_B")
    return found


def _stored_names(module: str) -> tuple[str, str]:
    return f"{module}{_WEIGHT}", f"{_OPTIONAL_PREFIX}{module}{_WEIGHT}"


def _check_targets(
    directory: Path, config: PeftAdapterConfig, pairs: Mapping[str, _Pair], layout: Layout, adaptable: AbstractSet[str]
) -> None:
    """Raise ValueError if the file lacks matrices of a target, or has matrices that peft would not use."""
    if config.targets is None:
        return
    path = directory / ADAPTER_WEIGHTS
    has_prefix = all(stored == f"{pair.module}{_WEIGHT}" for stored, pair in pairs.items())
    for stored, pieces in layout.of_stored.items():
        if pieces[0].ours not in adaptable:
            continue
        module = stored.removesuffix(_WEIGHT)
        module = module if has_prefix else module.removeprefix(_OPTIONAL_PREFIX)
        is_target = config.is_target(module)
        if is_target != (stored in pairs):
            what, which = ("lacks", "names") if is_target else ("has", "does not name")
            raise ValueError(f"{path} {what} matrices of {module}, which {ADAPTER_CONFIG} {which} as a target")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises ValueError if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}, the weights of its adapter") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read, get it again: {error}") from error


def _tensors(path: Path, outer_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the tensors of the file in float32, without copies of the base's."""
    with _opened(path) as file:
        names = [name for name in file.keys() if _copied(name, outer_names) is None]  # noqa: SIM118 (no mapping)
        tensors = {name: file.get_tensor(name) for name in names}
    if other := next((name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES), None):
        raise ValueError(f"{path}: {other} is {tensors[other].dtype}; an adapter is in float32, bfloat16 or float16")
    return {name: tensor.float() for name, tensor in tensors.items()}
