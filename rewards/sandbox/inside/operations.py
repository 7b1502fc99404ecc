"""Operations that one side can request on an object of the other side."""

from __future__ import annotations

import operator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
"""Arithmetic operators, each also as `radd`, `iadd` and so on."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OTHERS: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "contains": operator.contains,
    "delitem": operator.delitem,
    "getitem": operator.getitem,
    "hash": hash,
    "invert": operator.invert,
    "iter": iter,
    "len": len,
    "neg": operator.neg,
    "next": next,
    "pos": operator.pos,
    "repr": repr,
    "reversed": reversed,
    "setitem": operator.setitem,
    "str": str,
}
"""Operations that are also the names of special methods."""
ATTRIBUTES: dict[str, Callable[..., Any]] = {"getattr": getattr, "setattr": setattr, "delattr": delattr}


def _enter(context: Any) -> Any:
    return type(context).__enter__(context)


def _exit(context: Any, *args: Any) -> Any:
    # The traceback is not transferred.
    return type(context).__exit__(context, None if args[0] is None else args[0], args[1] if args[0] else None, None)


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda first, second: function(second, first)


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return getattr(operator, f"{name}_" if name in ("and", "or") else name)


def _call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


ALL: dict[str, Callable[..., Any]] = {
    **OTHERS,
    **ATTRIBUTES,
    **{name: getattr(operator, name) for name in COMPARISONS},
    **{name: _operator(name) for name in BINARY},
    **{f"r{name}": _swapped(_operator(name)) for name in BINARY},
    **{f"i{name}": getattr(operator, f"i{name}") for name in BINARY},
    "call": _call,
    "enter": _enter,
    "exit": _exit,
    "isinstance": isinstance,
    "issubclass": issubclass,
}
"""All operations by name; the first argument is the object."""
