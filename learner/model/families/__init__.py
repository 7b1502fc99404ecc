"""Registry of model families: the on-disk config keys and weight names of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from learner.model.config import Family, TransformerConfig
from learner.model.families import a2d, dream, fast_dllm, illada, llada, llada2, llada_moe, sdar, sdar_moe
from learner.model.families.layout import Layout
from learner.model.families.raw_config import RawConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFormat:
    """On-disk format of a family: its config keys and weight names."""

    model_type: str
    """The `model_type` of its `config.json`."""
    read_config: Callable[[RawConfig], TransformerConfig]
    """Converts its config to ours. Raises ValueError for settings that d1 does not compute."""
    write_config: Callable[[TransformerConfig], dict[str, Any]]
    """Makes the `config.json` that its original code reads, without `torch_dtype`."""
    outer_names: Mapping[str, str]
    """Maps our names of the parameters outside the blocks to the family's."""
    block_prefix: str
    """Prefix of its names of a block's parameters, before the block's number."""
    block_names: Mapping[str, str]
    """Maps our names of the modules inside a block to the family's. Several of ours with one name are one fused tensor,
    concatenated along its rows in our order."""

    expert_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps our name of a module of all experts to the family's names of one expert's modules; `{}` is the expert's
    number."""

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of our parameter `name`, or of the fused tensor that contains it."""
        if name in self.outer_names:
            return self.outer_names[name]
        prefix, module, kind = self._parts_of(name)
        return f"{prefix}.{self.block_names[module]}.{kind}"

    def layout(self, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """Map our parameters of these shapes to the tensors of the family's checkpoints."""
        return Layout(shapes, {name: self._stored_names(name, shape[0]) for name, shape in shapes.items()})

    def _stored_names(self, name: str, num_experts: int) -> list[str]:
        if name in self.outer_names:
            return [self.outer_names[name]]
        prefix, module, kind = self._parts_of(name)
        if module not in self.expert_names:
            return [self.checkpoint_name(name)]
        of_one = self.expert_names[module]
        return [f"{prefix}.{theirs.format(expert)}.{kind}" for expert in range(num_experts) for theirs in of_one]

    def _parts_of(self, name: str) -> tuple[str, str, str]:
        """Split our name into the family's name of the block, our name of the module, and the parameter's name."""
        _, index, inner = name.split(".", 2)
        module, _, kind = inner.rpartition(".")
        return f"{self.block_prefix}.{index}", module, kind


class _Names(Protocol):
    """Interface of a family's module."""

    @property
    def MODEL_TYPE(self) -> str: ...  # noqa: N802 (a module's constant)
    @property
    def OUTER_NAMES(self) -> Mapping[str, str]: ...  # noqa: N802
    @property
    def BLOCK_PREFIX(self) -> str: ...  # noqa: N802
    @property
    def BLOCK_NAMES(self) -> Mapping[str, str]: ...  # noqa: N802
    def read_config(self, raw: RawConfig, /) -> TransformerConfig: ...
    def write_config(self, config: TransformerConfig, /) -> dict[str, Any]: ...


def _format(names: _Names, expert_names: Mapping[str, tuple[str, ...]] | None = None) -> FamilyFormat:
    return FamilyFormat(
        model_type=names.MODEL_TYPE,
        read_config=names.read_config,
        write_config=names.write_config,
        outer_names=names.OUTER_NAMES,
        block_prefix=names.BLOCK_PREFIX,
        block_names=names.BLOCK_NAMES,
        expert_names=expert_names or {},
    )


def _adapted(family: Family) -> FamilyFormat:
    """Make the format of a family converted from an autoregressive architecture; its `model_type` is the family."""
    return FamilyFormat(
        model_type=family,
        read_config=partial(a2d.read_config, family),
        write_config=a2d.write_config,
        outer_names=a2d.OUTER_NAMES,
        block_prefix=a2d.BLOCK_PREFIX,
        block_names=a2d.BLOCK_NAMES[family],
    )


FAMILIES: dict[Family, FamilyFormat] = {
    "llada": _format(llada),
    "dream": _format(dream),
    "sdar": _format(sdar),
    "sdar_moe": _format(sdar_moe, sdar_moe.EXPERT_NAMES),
    # LLaDA2's experts have the same names as SDAR's.
    "llada2_moe": _format(llada2, sdar_moe.EXPERT_NAMES),
    "a2d-llama": _adapted("a2d-llama"),
    "a2d-qwen2": _adapted("a2d-qwen2"),
    "a2d-qwen3": _adapted("a2d-qwen3"),
    "illada": _format(illada),
    "llada_moe": _format(llada_moe, sdar_moe.EXPERT_NAMES),
    "fast_dllm": _format(fast_dllm),
}

_OTHER_FORMS = {
    "llada2_moe_veomni": "it is dFactory's form for training, with all experts of a layer in one tensor; "
    "its scripts/moe_convertor.py writes the published form, which d1 reads",
    "diffusion_gemma": "it has no mask token and keeps no token of a step for good, so no method trains it; "
    "`d1 sample` samples it, `d1 serve` serves it and `d1 eval` evaluates it",
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a checkpoint's config to ours, by the family of its `model_type`.

    Raises:
        ValueError: the family is unknown, or its `read_config` rejects the config.
    """
    raw.check({"quantization_config": None}, has_default=True)
    if others := [kind for kind in raw.get("layer_types", []) if kind != "full_attention"]:
        raise ValueError(f"{raw.path} has {others[0]!r} in layer_types; d1 computes 'full_attention' only")
    model_type = raw["model_type"]
    if model_type == llada_moe.MODEL_TYPE and llada_moe.is_own(raw):
        return llada_moe.read_config(raw)
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family.read_config(raw)
    if model_type in _OTHER_FORMS:
        raise ValueError(f"{raw.path} has model_type {model_type!r}: {_OTHER_FORMS[model_type]}")
    known = ", ".join(dict.fromkeys(repr(family.model_type) for family in FAMILIES.values()))
    raise ValueError(f"{raw.path} has model_type {model_type!r}; d1 reads {known}")
