"""Serialization: what travels between ingress and engine, as msgpack; these types and no others, and nothing is run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack
import numpy as np

from actors.registry.records import PolicyVersion
from deploy.service.contract import Began, BlocksDone, CanvasSeen, Done, Job, Refused
from rollout.grammar.grammar import Grammar
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.request import Committed, Completion, FinishReason, Progress, Request, SamplingParams, Writes

_RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Job, Began, BlocksDone, CanvasSeen, Done, Refused, PolicyVersion),
        *(Committed, Completion, FinishReason, Progress, Request, SamplingParams, Writes),
        *(RenoisingParams, RenoisingRequest, Grammar),
    )
}
_RECORD, _ARRAY = 1, 2
# Records within records; a Job has five at most.
_MOST_DEPTH = 16
_KINDS_OF_ARRAYS = "bif"


def pack(message: object) -> bytes:
    """The bytes of a message. Raises TypeError for what is none."""
    # Strict: subclasses of str and tuple are not taken for them.
    return bytes(msgpack.packb(message, default=_packed, strict_types=True))


def unpack(data: bytes) -> Any:
    """The message of some bytes; what was a list is a tuple. Raises ValueError where they are none."""
    return _unpack(data, depth=0)


def _unpack(data: bytes, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise ValueError("this is no message: it is nested too deeply")

    def part(code: int, within: bytes) -> Any:
        return _unpacked(code, within, depth + 1)

    try:
        return msgpack.unpackb(data, ext_hook=part, use_list=False, strict_map_key=False)
    # Whatever the bytes are: a record that is unknown, fields that it does not have, an array that does not fit.
    except Exception as error:
        raise ValueError(f"this is no message: {type(error).__name__}: {error}") from error


def _packed(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    name = type(value).__name__
    if isinstance(value, str) and name not in _RECORDS:
        # A word of an enumeration whose field takes any text.
        return str.__str__(value)
    if _RECORDS.get(name) is not type(value):
        raise TypeError(f"{name} is no message")
    if isinstance(value, Enum):
        known: Any = value.value
    elif is_dataclass(value):
        known = {column.name: getattr(value, column.name) for column in fields(value)}
    else:
        known = value.model_dump(mode="json")
    return msgpack.ExtType(_RECORD, pack([name, known]))


def _unpacked(code: int, data: bytes, depth: int) -> Any:
    if code == _ARRAY:
        dtype, shape, values = _unpack(data, depth)
        if np.dtype(dtype).kind not in _KINDS_OF_ARRAYS:
            raise ValueError(f"an array of {dtype} is no part of a message")
        return np.frombuffer(values, dtype=dtype).reshape(shape)
    if code != _RECORD:
        raise ValueError(f"{code} is no part of a message")
    name, known = _unpack(data, depth)
    kind = _RECORDS[name]
    return kind(known) if issubclass(kind, Enum) else kind(**known)
