"""The families of policies that d1 knows, as they are on disk: the one place that says what belongs to which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from learner.model.config import Family, TransformerConfig
from learner.model.families import dream, llada, sdar
from learner.model.families.raw_config import RawConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFormat:
    """What a family calls things on disk."""

    model_type: str
    """Its name in `config.json`."""
    read_config: Callable[[RawConfig], TransformerConfig]
    """Our config from its own. Raises ValueError for what we do not compute."""
    write_config: Callable[[TransformerConfig], dict[str, Any]]
    """The `config.json` that its original code reads, without `torch_dtype`."""
    outer_names: Mapping[str, str]
    """Its names of the parameters outside the blocks, by ours."""
    block_prefix: str
    """What its names of a block's parameters begin with, before the block's number."""
    block_names: Mapping[str, str]
    """Its names of the modules inside a block, by ours."""

    def checkpoint_name(self, name: str) -> str:
        """The name that its checkpoints give to our parameter `name`."""
        if name in self.outer_names:
            return self.outer_names[name]
        _, index, inner = name.split(".", 2)
        module, _, kind = inner.rpartition(".")
        return f"{self.block_prefix}.{index}.{self.block_names[module]}.{kind}"


FAMILIES: dict[Family, FamilyFormat] = {
    "llada": FamilyFormat(
        model_type=llada.MODEL_TYPE,
        read_config=llada.read_config,
        write_config=llada.write_config,
        outer_names=llada.OUTER_NAMES,
        block_prefix=llada.BLOCK_PREFIX,
        block_names=llada.BLOCK_NAMES,
    ),
    "dream": FamilyFormat(
        model_type=dream.MODEL_TYPE,
        read_config=dream.read_config,
        write_config=dream.write_config,
        outer_names=dream.OUTER_NAMES,
        block_prefix=dream.BLOCK_PREFIX,
        block_names=dream.BLOCK_NAMES,
    ),
    "sdar": FamilyFormat(
        model_type=sdar.MODEL_TYPE,
        read_config=sdar.read_config,
        write_config=sdar.write_config,
        outer_names=sdar.OUTER_NAMES,
        block_prefix=sdar.BLOCK_PREFIX,
        block_names=sdar.BLOCK_NAMES,
    ),
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Our config from a checkpoint's, by the family that its `model_type` names.

    Raises:
        ValueError: another family, or what the family's `read_config` refuses.
    """
    raw.check({"quantization_config": None}, may_lack=True)
    model_type = raw["model_type"]
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family.read_config(raw)
    known = ", ".join(repr(family.model_type) for family in FAMILIES.values())
    raise ValueError(f"{raw.path} has model_type {model_type!r}; d1 reads {known}")
