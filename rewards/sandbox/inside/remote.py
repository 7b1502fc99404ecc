"""Proxies for objects of the other process."""

from __future__ import annotations

from rewards.sandbox.inside import operations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OWN = ("_d1_peer", "_d1_number")


class Remote:
    """Proxy of an object in the other process: operations on it are forwarded."""

    def __init__(self, peer: Any, number: int) -> None:
        object.__setattr__(self, "_d1_peer", peer)
        object.__setattr__(self, "_d1_number", number)

    def __getattr__(self, name: str) -> Any:
        if name in ("__set_name__", "__wrapped__"):
            raise AttributeError(name)
        return self._d1_peer.call("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._d1_peer.call("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._d1_peer.call("delattr", self, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._d1_peer.call("call", self, *args, **kwargs)

    def __enter__(self) -> Any:
        return self._d1_peer.call("enter", self)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        return self._d1_peer.call("exit", self, kind, None if error is None else str(error))


class RemoteClass(Remote):
    """Proxy of a class in the other process. Plain data is never an instance of it."""

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._d1_peer.call("isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteClass) and bool(self._d1_peer.call("issubclass", value, self))


def _asks(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        return self._d1_peer.call(name, self, *args)

    return method


def _compares(name: str) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        return self._d1_peer.call(name, self, other) if isinstance(other, Remote) else NotImplemented

    return method


def _calculates(name: str) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        result = self._d1_peer.call(name, self, other)
        return result if isinstance(other, Remote) or isinstance(result, Remote) else NotImplemented

    return method


for _name in operations.OTHERS:
    setattr(Remote, f"__{_name}__", _asks(_name))
for _name in operations.COMPARISONS:
    setattr(Remote, f"__{_name}__", _compares(_name))
for _name in operations.BINARY:
    for _form in (_name, f"r{_name}", f"i{_name}"):
        setattr(Remote, f"__{_form}__", _calculates(_form))
