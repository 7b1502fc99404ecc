"""RPC between the tests and the program: two processes that call each other's functions without trust.

Plain data is passed by value. Any other object stays in its process, and the other side gets a `Remote`, a proxy that
forwards operations to it. The reply to a call also contains its changes to the lists, dicts, sets and deques that were
passed to it.

The tests' side decides comparisons with plain data itself. An object of the program's own class never equals plain
data, has no order relative to it, is not a number, and adding it to plain data never gives plain data. Otherwise an
`__eq__` that is always true would pass every test.
"""

from __future__ import annotations

import builtins
import sys

from rewards.sandbox.inside import operations, wire
from rewards.sandbox.inside.remote import Remote, RemoteClass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from typing import Any
else:
    # The same class, without the 5 ms that importing `collections` takes.
    from _collections import deque

_MUTABLE = (list, dict, set, bytearray, deque)


class PeerGone(BaseException):
    """The other side has ended, or sent something unreadable. `except Exception` in a test does not catch it."""


class Peer:
    """This side's end of the RPC channel."""

    def __init__(self, fd: int, is_allowed: Callable[[str, tuple[Any, ...]], bool]) -> None:
        """Communicate over the socket `fd`. `is_allowed` decides which operations the other side may perform here."""
        self._fd, self._is_allowed = fd, is_allowed
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, Any] = {}
        self.plain_only = False
        """Whether only plain data is accepted from the other side: neither objects nor changes to arguments."""
        self.gone = False
        """Whether the other side has ended."""
        self.has_called = False
        """Whether any request was sent: only then can the other side be the cause of a failure."""

    def send(self, message: Any) -> None:
        """Send a message. Raises ValueError if it cannot be encoded, and `PeerGone`."""
        data = wire.encode(message, self._refer)
        try:
            wire.send(self._fd, data)
        except OSError:
            self.gone = True
            raise PeerGone from None

    def receive(self) -> tuple[Any, ...]:
        """Return the next message. Raises `PeerGone`."""
        data = wire.receive(self._fd)
        try:
            message = None if data is None else wire.decode(data, self._resolve)
        except NotPlainError:
            raise
        except Exception:
            message = None
        if not isinstance(message, tuple) or not message:
            self.gone = True
            raise PeerGone
        return message

    def call(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Perform an operation on the other side and return its result. Raises what it raises there, TypeError, or
        `PeerGone`."""
        self.has_called = True
        given = _mutable_by_place(args, kwargs)
        try:
            self.send(("do", operation, args, kwargs))
        except ValueError as error:
            raise TypeError(str(error)) from None
        while True:
            match self.receive():
                case ("do", str(name), tuple(theirs), dict(keywords)):
                    self._serve(name, theirs, keywords)
                case ("gave", result, tuple(changed)):
                    self._apply(given, changed)
                    return result
                case ("gave argument", (int() | str()) as place, tuple(changed)) if place in given:
                    self._apply(given, changed)
                    return self._given_back(given, place, changed)
                case ("raised", type() as kind, tuple(details)) if issubclass(kind, BaseException):
                    raise _made(kind, details) from None
                case _:
                    self.gone = True
                    raise PeerGone

    def serve_forever(self) -> None:
        """Perform the operations that the other side requests until it is gone. Raises `PeerGone`."""
        while True:
            match self.receive():
                case ("do", str(name), tuple(args), dict(kwargs)):
                    self._serve(name, args, kwargs)
                case _:
                    raise PeerGone

    def _serve(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if name not in operations.ALL or not self._is_allowed(name, args):
                raise TypeError(f"{name} is not possible here")
            given = _mutable_by_place(args, kwargs)
            before = {place: wire.encode(a, self._refer) for place, a in given.items()}
            result = operations.ALL[name](*args, **kwargs)
            changed = tuple((place, a) for place, a in given.items() if wire.encode(a, self._refer) != before[place])
            same = [place for place, a in given.items() if a is result]
            reply = ("gave argument", same[0], changed) if same else ("gave", result, changed)
            self.send(reply)
        except PeerGone:
            raise
        except BaseException as error:
            self.send(("raised", type(error), tuple(_plain(detail) for detail in error.args)))

    def _given_back(self, given: dict[int | str, Any], place: int | str, changed: tuple[Any, ...]) -> Any:
        """Return the argument that is also the result, or its changed copy if our argument must not change."""
        return dict(changed).get(place, given[place]) if self.plain_only else given[place]

    def _apply(self, given: dict[int | str, Any], changed: tuple[Any, ...]) -> None:
        if self.plain_only:
            return
        for place, new in changed:
            _update(given[place], new)

    def _refer(self, value: Any) -> Any:
        """Return the reference to an object: its owner, its number, and its kind."""
        if isinstance(value, Remote):
            return ("yours", value._d1_number)
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "builtins":
            return ("error", value.__name__)
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)
        if not isinstance(value, type):
            return ("object", number)
        if not issubclass(value, BaseException):
            return ("class", number)
        return ("error class", number, value.__module__, value.__name__, value.__bases__)

    def _resolve(self, reference: Any) -> Any:
        match reference:
            case ("yours", int(number)) if 0 <= number < len(self._mine):
                return self._mine[number]
            case ("error", str(name)):
                kind = getattr(builtins, name, None)
                return kind if isinstance(kind, type) and issubclass(kind, BaseException) else RuntimeError
            case ("error class", int(number), str(module), str(name), tuple(bases)):
                if number not in self._theirs:
                    self._theirs[number] = _error_class(module, name, bases)
                return self._theirs[number]
            case ("object" | "class" as kind, int(number)):
                if self.plain_only:
                    raise NotPlainError("the program returned an object that is no plain data")
                if number not in self._theirs:
                    self._theirs[number] = (RemoteClass if kind == "class" else Remote)(self, number)
                return self._theirs[number]
            case _:
                raise ValueError("a reference to nothing")


class NotPlainError(TypeError):
    """A result is an object, although only plain data is accepted."""


def _mutable_by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """Return the arguments that an operation may change, by position or keyword."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {place: value for place, value in places if isinstance(value, _MUTABLE)}


def _error_class(module: str, name: str, bases: tuple[Any, ...]) -> type[BaseException]:
    """Return a class for an error that the other side defines, or the same class of the standard library."""
    known = (
        getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in sys.stdlib_module_names else None
    )
    if isinstance(known, type) and issubclass(known, BaseException):
        return known
    # Its other bases do not exist in this process.
    errors = tuple(base for base in bases if isinstance(base, type) and issubclass(base, BaseException))
    if not errors:
        raise ValueError("an error without a base")
    return type(name, errors, {})


def _made(kind: type[BaseException], details: tuple[Any, ...]) -> BaseException:
    # Not `kind(*details)`: constructors of standard errors take other arguments than `args` contains.
    error = kind.__new__(kind)
    error.args = details
    return error


def _plain(value: Any) -> Any:
    try:
        wire.encode(value)
    except Exception:
        return type(value).__name__
    return value


def _update(old: Any, new: Any) -> None:
    """Make `old` equal to `new` in place, recursively for containers of the same kind."""
    if type(old) is not type(new) or not isinstance(old, _MUTABLE):
        return
    if isinstance(old, (list, deque)):
        kept = [_updated(old[i], item) if i < len(old) else item for i, item in enumerate(new)]
        old.clear()
        old.extend(kept)
    elif isinstance(old, dict):
        items = [(key, _updated(old[key], item) if key in old else item) for key, item in new.items()]
        old.clear()
        old.update(items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    else:
        old[:] = new


def _updated(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, _MUTABLE):
        _update(old, new)
        return old
    return new
