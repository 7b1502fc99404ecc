"""`adapter_config.json` of a peft directory: scaling, adapted modules and base checkpoint."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

from learner.model.autoregressive.gguf_file import PACKAGED
from learner.model.families.raw_config import CONFIG
from learner.model.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_checkpoint, is_hub_id

_PICKLED_WEIGHTS = "adapter_model.bin"
_OWN_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Keys without effect on a trained adapter: they concern its training, its initialization or the tool that wrote it.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        # peft itself resets it for PyTorch's linear layers.
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "runtime_config",
        "task_type",
    }
)
# Values of `init_lora_weights` that do not change the base. With peft's other values the initial B A is subtracted.
_INITS = ("gaussian", "eva", "orthogonal", "mica")
_Number = TypeVar("_Number", int, float)


class PeftAdapterConfig(BaseModel):
    """Keys of an `adapter_config.json` that determine what its matrices compute; the defaults are peft's."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    peft_type: str
    """The method; `LORA` is the one that d1 reads."""
    base_model_name_or_path: str | None = None
    """The base checkpoint: a directory or a hub id. peft omits it if the model was not loaded from one."""
    revision: str | None = None
    """The base checkpoint's revision on the hub."""
    r: PositiveInt = 8
    """Rank of each layer that `rank_pattern` does not name."""
    lora_alpha: float = 8
    """Alpha of each layer that `alpha_pattern` does not name."""
    use_rslora: bool = False
    """Whether B A is multiplied by alpha / sqrt(rank) instead of alpha / rank."""
    rank_pattern: dict[str, PositiveInt] | None = None
    """Ranks by suffix of a module's name, or by regular expression."""
    alpha_pattern: dict[str, float] | None = None
    """Alphas likewise."""
    target_modules: str | list[str] | None = None
    """The adapted modules: suffixes of their names, a regular expression, or `all-linear`."""
    exclude_modules: str | list[str] | None = None
    """Modules that are not adapted, likewise."""
    layers_to_transform: int | list[int] | None = None
    """The adapted blocks; None for all."""
    layers_pattern: str | list[str] | None = None
    """Names of the list of blocks, for `layers_to_transform`."""
    init_lora_weights: bool | str | None = True
    """How the matrices were initialised, and for some values also the base."""
    bias: str | None = "none"
    """Which biases were trained; d1 reads `none`."""

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _are_patterns(cls, patterns: dict[str, Any] | None) -> dict[str, Any] | None:
        for pattern in patterns or ():
            _check_pattern(pattern)
        return patterns

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _is_pattern(cls, modules: str | list[str] | None) -> str | list[str] | None:
        if isinstance(modules, str):
            _check_pattern(modules)
        return modules

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the config of a peft directory.

        Raises ValueError for a damaged file, a setting that d1 does not compute, or a directory that also has weights.
        """
        _check_files(directory)
        path = directory / ADAPTER_CONFIG
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(values, dict):
                raise ValueError(f"it is a {type(values).__name__}, and should be an object")
            config = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = f"{first['loc'][0]}: " if first["loc"] else ""
            what = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{path} is no config of an adapter: {place}{what}") from error
        except ValueError as error:
            raise ValueError(f"{path} is no config of an adapter: {error}") from error
        if (unsupported_setting := config.unsupported_setting()) is not None:
            raise ValueError(f"{path} has {unsupported_setting}")
        return config

    def unsupported_setting(self) -> str | None:
        """Return an error message for the first setting that d1 does not compute; None if it computes all."""
        if self.peft_type != "LORA":
            return f"peft_type = {self.peft_type!r}; d1 reads 'LORA' only"
        if not self.base_model_name_or_path:
            return f"base_model_name_or_path = {self.base_model_name_or_path!r}; write the base's path or hub id there"
        if self.bias not in (None, "none"):
            return f"bias = {self.bias!r}; d1 reads adapters without trained biases only, bias = 'none'"
        init = self.init_lora_weights
        if isinstance(init, str) and init.lower() not in _INITS:
            return (
                f"init_lora_weights = {init!r}, with which peft also changes the base's weights; save the adapter for "
                "the original base, with path_initial_model_for_weight_conversion of save_pretrained"
            )
        others = self.model_extra or {}
        for key in sorted(others.keys() - _WITHOUT_EFFECT):
            # Absent, null, false and empty are peft's defaults of optional features.
            if others[key]:
                return f"{key} = {others[key]!r}; d1 reads adapters of lora_A and lora_B only, without {key}"
        return None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the original model."""
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scaling_of(self, module: str) -> float:
        """Return the multiplier of B A of a module, by its name in the original model."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def targets(self) -> str | list[str] | None:
        """`target_modules`; None for `all-linear`, which depends on the original code's modules."""
        is_all = isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"
        return None if is_all else self.target_modules

    def is_target(self, module: str) -> bool:
        """Whether `targets`, which must not be None, include a module, by its name in the original model."""
        targets = self.targets
        assert targets is not None, "they do not say it"
        if _is_named(self.exclude_modules or (), module):
            return False
        if isinstance(targets, str):
            return _is_named(targets, module)
        # `layers_to_transform` applies only to modules that are listed by suffix.
        return module in targets or (_is_named(targets, module) and self._is_of_its_layers(module))

    def _is_of_its_layers(self, module: str) -> bool:
        layers, names = self.layers_to_transform, self.layers_pattern
        if layers is None or layers == []:
            return True
        names = [names] if isinstance(names, str) else names
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in names or ()] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def is_peft(directory: Path) -> bool:
    """Whether a directory holds an adapter that peft wrote."""
    if any((directory / name).is_file() for name in (ADAPTER_WEIGHTS, _PICKLED_WEIGHTS)):
        return True
    return (directory / ADAPTER_CONFIG).is_file() and not any((directory / name).is_file() for name in _OWN_WEIGHTS)


def find_base(directory: Path, find: Callable[[Path | str], Path] = find_checkpoint) -> Path:
    """Find the directory of a peft adapter's base checkpoint.

    Args:
        directory: the adapter's directory. A relative path in its config is resolved against the current directory, as
            in peft, or else against this one.
        find: fetches the needed files of a base on the hub.

    Raises ValueError that names the base if it is missing, or as `PeftAdapterConfig.read`.
    """
    config = PeftAdapterConfig.read(directory)
    named = config.base_model_name_or_path or ""
    places = [place for place in (Path(named), directory / named) if place.is_dir()]
    for place in places:
        if (place / CONFIG).is_file() or is_peft(place):
            return place
    if places:
        raise ValueError(f"the base {places[0]} of the adapter in {directory} is not a checkpoint: it has no {CONFIG}")
    revision = f"@{config.revision}" if config.revision and is_hub_id(named) else ""
    if not is_hub_id(named):
        raise ValueError(f"the base {named} of the adapter in {directory} is not here: {_how_to_get(named, directory)}")
    try:
        return find(named + revision)
    except ValueError as error:
        raise ValueError(
            f"the base {named} of the adapter in {directory} is not here: {error}; if it has moved, write its path "
            f"into base_model_name_or_path of {directory / ADAPTER_CONFIG}"
        ) from error


def _how_to_get(named: str, directory: Path) -> str:
    """Make the part of an error message that says how to get a missing base directory."""
    model = PACKAGED if Path(named).name == PACKAGED else "MODEL"
    place = named if Path(named).is_absolute() else os.path.relpath(directory / named)
    return (
        f"`d1 adapt {model} {place} sft.num_steps=0` makes the policy of an autoregressive model; if it has moved, "
        f"write its path into base_model_name_or_path of {directory / ADAPTER_CONFIG}"
    )


def _check_files(directory: Path) -> None:
    """Raise ValueError if a directory also holds a model, has no adapter config, or its weights are pickled."""
    if not (directory / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{directory} has an adapter's weights and no {ADAPTER_CONFIG}, which names its base and scaling; put the "
            "one that peft wrote with them there"
        )
    if own := [name for name in _OWN_WEIGHTS if (directory / name).is_file()]:
        raise ValueError(
            f"{directory} has both an adapter and {own[0]}, so it is unclear which is meant; move one of them elsewhere"
        )
    if (directory / _PICKLED_WEIGHTS).is_file() and not (directory / ADAPTER_WEIGHTS).is_file():
        raise ValueError(
            f"{directory / _PICKLED_WEIGHTS} is pickled, which d1 never reads; save the adapter as {ADAPTER_WEIGHTS}, "
            "with safe_serialization=True of peft's save_pretrained"
        )


def _by_pattern(values: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    """Return the value of the first pattern that matches a suffix of a module's name, starting at a dot."""
    fitting = (value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(fitting, default)


def _is_named(names: str | Sequence[str], module: str) -> bool:
    """Whether a regular expression matches the whole name, or one of several names is a suffix that starts at a dot."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
