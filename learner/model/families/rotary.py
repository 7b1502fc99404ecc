"""The rotary settings of a `config.json`, for all families and in both of transformers' spellings.

Until version 4, transformers wrote `rope_theta` and `rope_scaling`. Version 5 writes one `rope_parameters`, which holds
the base as well, and may hold settings for each type of layer. Either spelling may stand beside the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from learner.model.families.raw_config import RawConfig

if TYPE_CHECKING:
    from learner.model.config import TransformerConfig

_PARAMETERS, _SCALING = "rope_parameters", "rope_scaling"
_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_KINDS = ("rope_type", "type")
# How the config's own keys of positions begin, and those of them that are read here or by a family.
_OF_ROTARY = ("rope_", "rotary_", "partial_rotary_")
_READ = (_PARAMETERS, _SCALING, "rotary_dim", "rope_full_precision")
# Without scaling these do nothing, whatever they are or if they are 1.
_INERT = ("original_max_position_embeddings",)
_INERT_AT_ONE = ("attention_factor", "factor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How positions rotate queries and keys."""

    theta: float
    """Base of the frequencies."""
    width: int | None
    """How much of a head's width is rotated, from its beginning; None: all of it."""


def read_rotary(raw: RawConfig, partial_of: int | None = None) -> Rotary:
    """Read the rotary settings of a config.

    Args:
        raw: the config.
        partial_of: the width of a head, for a family that may rotate a part of it.

    Raises:
        ValueError: the base is missing, two settings contradict each other, or they ask for a rotation that d1 does
            not compute.
    """
    stated = list(_stated(raw))
    own = {key: value for key, value in raw.values.items() if key.startswith(_OF_ROTARY) and key not in _READ}
    for place, settings in [("", own), *stated[1:]]:
        _check_unscaled(raw, place, settings)
    theta, factor = _agreed(raw, _THETA, stated), _agreed(raw, _PARTIAL, stated)
    if theta is None:
        raise ValueError(f"{raw.path} has no {_THETA}")
    if partial_of is not None:
        return Rotary(theta=theta, width=_width(raw, factor, partial_of))
    if factor not in (None, 1):
        raise ValueError(f"{raw.path} has {_PARTIAL} = {factor!r}; of {raw['model_type']} d1 computes 1.0 only")
    if raw.get("rotary_dim") not in (None, raw.get("head_dim")):
        raise ValueError(
            f"{raw.path} has rotary_dim = {raw['rotary_dim']!r}; of {raw['model_type']} d1 rotates whole heads"
        )
    return Rotary(theta=theta, width=None)


def write_rotary(config: TransformerConfig) -> dict[str, Any]:
    """The settings in the spelling that the families' original code reads, as do both versions of transformers."""
    return {_SCALING: None, _THETA: config.rope_theta}


def _stated(raw: RawConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All settings by their place in the file: the config's own keys, whose place is empty, and those of each object
    that holds any."""
    yield "", raw.values
    for name in (_SCALING, _PARAMETERS):
        found = raw.get(name)
        if found is None or found is False:
            continue
        if not isinstance(found, dict):
            raise ValueError(f"{raw.path} has {name} = {found!r}; it should be an object, or null")
        nested = {key: value for key, value in found.items() if isinstance(value, dict)}
        yield name, {key: value for key, value in found.items() if key not in nested}
        for key, value in nested.items():
            yield f"{name}.{key}", value


def _check_unscaled(raw: RawConfig, place: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError that names the setting which asks for more than the plain rotation."""
    # Linear scaling divides positions by its factor.
    plain = ("default", "linear") if _is_one(settings.get("factor")) else ("default",)
    # The kind says more than a factor beside it.
    for key, value in sorted(settings.items(), key=lambda one: one[0] not in _KINDS):
        is_known = (
            (key in _KINDS and value in plain)
            or (key in _INERT_AT_ONE and _is_one(value))
            or key in (*_INERT, _THETA, _PARTIAL)
            # These say nothing, but for a null in the place of what rotates all layers.
            or ((value is None and key != "full_attention") or value is False)
        )
        if not is_known:
            name = f"{place}.{key}".lstrip(".")
            raise ValueError(
                f"{raw.path} has {name} = {value!r}; d1 computes unscaled rotary positions only, which are "
                "rope_type 'default'"
            )


def _is_one(value: object) -> bool:
    return value == 1 and not isinstance(value, bool)


def _agreed(raw: RawConfig, key: str, stated: list[tuple[str, Mapping[str, Any]]]) -> float | None:
    """The number that all places which have the key give it; None where none has it."""
    found = {f"{place}.{key}".lstrip("."): settings[key] for place, settings in stated if settings.get(key) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise ValueError(f"{raw.path} has {name} = {value!r}; it should be a number above 0")
    first, *others = found.items() or [("", None)]
    for other in others:
        if other[1] != first[1]:
            both = " and ".join(f"{name} = {value!r}" for name, value in (first, other))
            raise ValueError(f"{raw.path} has {both}; they should be equal")
    return first[1]


def _width(raw: RawConfig, factor: float | None, head_width: int) -> int:
    """How much of a head's width is rotated: a whole number, which the original code's frequencies are over."""
    width = head_width * (1.0 if factor is None else factor)
    if width > head_width or not math.isclose(width, round(width)):
        raise ValueError(f"{raw.path} has {_PARTIAL} = {factor!r}, which rotates {width:g} of a head's {head_width}")
    stated = raw.get("rotary_dim", round(width))
    if stated != round(width):
        raise ValueError(
            f"{raw.path} has rotary_dim = {stated!r}, and {_PARTIAL} = {factor!r} rotates {round(width)} of a head's "
            f"{head_width}; they should be equal"
        )
    return round(width)
