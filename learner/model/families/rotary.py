"""Rotary settings of a `config.json`, for all families and in both of transformers' formats.

Up to version 4, transformers wrote `rope_theta` and `rope_scaling`. Version 5 writes one `rope_parameters`, which also
holds the base, and may hold settings for each type of layer. A config may contain both formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from learner.model.attention.scaling import SCALINGS, RotaryScaling
from learner.model.families.raw_config import RawConfig

if TYPE_CHECKING:
    from learner.model.config import TransformerConfig

_PARAMETERS, _SCALING = "rope_parameters", "rope_scaling"
_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_KINDS = ("rope_type", "type")
# Prefixes of the config's top-level rotary keys, and those keys that are read here or by a family.
_OF_ROTARY = ("rope_", "rotary_", "partial_rotary_")
_READ = (_PARAMETERS, _SCALING, "rotary_dim", "rope_full_precision")
# Without scaling, `_INERT` have no effect with any value, and `_INERT_AT_ONE` if they are 1.
_ORIGINAL = "original_max_position_embeddings"
_INERT = (_ORIGINAL,)
_INERT_AT_ONE = ("attention_factor", "factor")
# With scaling this has no effect: YaRN's own code wrote it about its training, and transformers ignores it.
_IGNORED = ("finetuned",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary settings of a policy."""

    theta: float
    """Base of the frequencies."""
    width: int | None
    """Rotated part of a head's width, from its beginning; None: all of it."""
    scaling: RotaryScaling | None
    """Scaling of the positions; None: unscaled."""


def read_rotary(
    raw: RawConfig, partial_of: int | None = None, *, may_scale: bool = False, default_theta: float | None = None
) -> Rotary:
    """Read the rotary settings of a config.

    Args:
        raw: the config.
        partial_of: the width of a head, for a family that may rotate only a part of it.
        may_scale: whether the family's positions may be scaled.
        default_theta: the base if the config has none; None: the config must have one.

    Raises:
        ValueError: the base is missing, two settings contradict each other, or they require a rotation that d1 does
            not compute.
    """
    stated = list(_stated(raw))
    own = {key: value for key, value in raw.values.items() if key.startswith(_OF_ROTARY) and key not in _READ}
    scalings: dict[str, RotaryScaling | None] = {}
    for place, settings in [("", own), *stated[1:]]:
        if place and may_scale and _is_scaled(settings):
            scalings[place] = _read_scaling(raw, place, settings)
        else:
            _check_unscaled(raw, place, settings, may_scale=may_scale)
            # An object without a kind may hold the base alone, and then says nothing about scaling.
            if any(settings.get(key) for key in _KINDS):
                scalings[place] = None
    scaling = _only(raw, scalings)
    theta, factor = _agreed(raw, _THETA, stated), _agreed(raw, _PARTIAL, stated)
    theta = default_theta if theta is None else theta
    if theta is None:
        raise ValueError(f"{raw.path} has no {_THETA}")
    if partial_of is not None:
        return Rotary(theta=theta, width=_width(raw, factor, partial_of), scaling=scaling)
    if factor not in (None, 1):
        raise ValueError(f"{raw.path} has {_PARTIAL} = {factor!r}; of {raw['model_type']} d1 computes 1.0 only")
    if raw.get("rotary_dim") not in (None, raw.get("head_dim")):
        raise ValueError(
            f"{raw.path} has rotary_dim = {raw['rotary_dim']!r}; of {raw['model_type']} d1 rotates whole heads"
        )
    return Rotary(theta=theta, width=None, scaling=scaling)


def write_rotary(config: TransformerConfig) -> dict[str, Any]:
    """Write the settings in the older format, which the families' original code and both transformers versions read."""
    scaling = None if config.rope_scaling is None else config.rope_scaling.model_dump(exclude_none=True)
    return {_SCALING: scaling, _THETA: config.rope_theta}


def _stated(raw: RawConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all settings by their place in the file: the top-level keys, whose place is "", and each rotary object."""
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


def _check_unscaled(raw: RawConfig, place: str, settings: Mapping[str, Any], *, may_scale: bool) -> None:
    """Raise ValueError that names the first setting that requires a scaled rotation."""
    # Linear scaling by a factor of 1 is no scaling.
    plain = ("default", "linear") if _is_one(settings.get("factor")) else ("default",)
    # The kind first: in an error message it says more than the factor.
    for key, value in sorted(settings.items(), key=lambda one: one[0] not in _KINDS):
        is_known = (
            (key in _KINDS and value in plain)
            or (key in _INERT_AT_ONE and _is_one(value))
            or key in (*_INERT, _THETA, _PARTIAL)
            # Null and false mean no setting, except a null `full_attention`, which should hold those of all layers.
            or ((value is None and key != "full_attention") or value is False)
        )
        if not is_known:
            name = f"{place}.{key}".lstrip(".")
            computed = (
                f"of {raw['model_type']} d1 computes rope_type 'default', " + ", ".join(map(repr, SCALINGS)) + " only"
                if may_scale
                else "d1 computes unscaled rotary positions only, which are rope_type 'default'"
            )
            raise ValueError(f"{raw.path} has {name} = {value!r}; {computed}")


def _is_scaled(settings: Mapping[str, Any]) -> bool:
    """Whether the settings name one kind of scaling that d1 computes; linear scaling by 1 does not count."""
    kinds = [settings[key] for key in _KINDS if settings.get(key) is not None]
    # A damaged config may hold an unhashable kind.
    if not kinds or not isinstance(kinds[0], str) or kinds.count(kinds[0]) != len(kinds):
        return False
    return kinds[0] in SCALINGS and not (kinds[0] == "linear" and _is_one(settings.get("factor")))


def _read_scaling(raw: RawConfig, place: str, settings: Mapping[str, Any]) -> RotaryScaling:
    """Read the scaling of these settings. Defaults are those of transformers' `modeling_rope_utils`."""
    kept = {key: value for key, value in settings.items() if value is not None}
    kind = next(kept[key] for key in _KINDS if key in kept)
    given = {key: value for key, value in kept.items() if key not in (*_KINDS, *_IGNORED, _THETA, _PARTIAL)}
    if kind == "linear":
        given = {key: value for key, value in given.items() if key not in _INERT}
    else:
        given[_ORIGINAL] = raw.get(_ORIGINAL, given.get(_ORIGINAL, raw["max_position_embeddings"]))
    try:
        return SCALINGS[kind](**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (place, *first["loc"])))
        has = f"has no {name}" if first["type"] == "missing" else f"has {name} = {first['input']!r}"
        raise ValueError(f"{raw.path} {has}; of rope_type {kind!r}: {first['msg']}") from error


def _only(raw: RawConfig, scalings: Mapping[str, RotaryScaling | None]) -> RotaryScaling | None:
    """Return the scaling that all places share. Raises ValueError if they differ."""
    first, *others = scalings.items() or [("", None)]
    for place, scaling in others:
        if scaling != first[1]:
            raise ValueError(
                f"{raw.path} has {first[0]} and {place}, which scale positions differently; they should be equal"
            )
    return first[1]


def _is_one(value: object) -> bool:
    return value == 1 and not isinstance(value, bool)


def _agreed(raw: RawConfig, key: str, stated: list[tuple[str, Mapping[str, Any]]]) -> float | None:
    """Return the value of a key, which must be equal in all places that have it; None if none has it."""
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
    """Compute the rotated part of a head's width: a whole number, which the original code's frequencies depend on."""
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
