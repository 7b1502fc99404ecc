"""One of two processes that call each other's functions. Neither trusts the other.

Plain data crosses by value. Any other object stays where it is, and the other side gets a `Remote` that asks for what
is done with it. A call also brings back what it changed in the lists, dicts, sets and deques that it was given.

What the tests decide, they decide on their own side: an object of the program's own class is never asked whether it
equals plain data, has no order beside it, is no number, and what it gives when it is added to plain data is no plain
data. Otherwise an `__eq__` that is always true would pass every test.
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
    # The same, without the 5 ms that `collections` takes to import.
    from _collections import deque

_MUTABLE = (list, dict, set, bytearray, deque)


class Gone(BaseException):
    """The other side has ended, or says nothing that could be read. No `except Exception` of a test hides it."""


class Peer:
    """This side's end of the channel."""

    def __init__(self, fd: int, allows: Callable[[str, tuple[Any, ...]], bool]) -> None:
        """Talk over the socket `fd`. `allows` says which operations the other side may do here."""
        self._fd, self._allows = fd, allows
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, Any] = {}
        self.plain_only = False
        """Whether only plain data may come from there: neither objects nor changes of what was given."""
        self.gone = False
        """Whether the other side has ended."""
        self.asked = False
        """Whether it was asked for anything: only then can it be what a failure comes from."""

    def send(self, message: Any) -> None:
        """Send a message. Raises ValueError for one that cannot cross, `Gone`."""
        data = wire.encode(message, self._refer)
        try:
            wire.send(self._fd, data)
        except OSError:
            self.gone = True
            raise Gone from None

    def receive(self) -> tuple[Any, ...]:
        """The next message. Raises `Gone`."""
        data = wire.receive(self._fd)
        try:
            message = None if data is None else wire.decode(data, self._resolve)
        except NotPlainError:
            raise
        except Exception:
            message = None
        if not isinstance(message, tuple) or not message:
            self.gone = True
            raise Gone
        return message

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """What an operation gives on the other side. Raises what it raises there, TypeError, `Gone`."""
        self.asked = True
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
                    raise Gone

    def serve_forever(self) -> None:
        """Do what the other side asks for until it is gone. Raises `Gone`."""
        while True:
            match self.receive():
                case ("do", str(name), tuple(args), dict(kwargs)):
                    self._serve(name, args, kwargs)
                case _:
                    raise Gone

    def _serve(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if name not in operations.ALL or not self._allows(name, args):
                raise TypeError(f"{name} is not possible here")
            given = _mutable_by_place(args, kwargs)
            before = {place: wire.encode(a, self._refer) for place, a in given.items()}
            result = operations.ALL[name](*args, **kwargs)
            changed = tuple((place, a) for place, a in given.items() if wire.encode(a, self._refer) != before[place])
            same = [place for place, a in given.items() if a is result]
            reply = ("gave argument", same[0], changed) if same else ("gave", result, changed)
            self.send(reply)
        except Gone:
            raise
        except BaseException as error:
            self.send(("raised", type(error), tuple(_plain(detail) for detail in error.args)))

    def _given_back(self, given: dict[int | str, Any], place: int | str, changed: tuple[Any, ...]) -> Any:
        """An argument that is the result: where ours stays as it was, what the function made of it."""
        return dict(changed).get(place, given[place]) if self.plain_only else given[place]

    def _apply(self, given: dict[int | str, Any], changed: tuple[Any, ...]) -> None:
        if self.plain_only:
            return
        for place, new in changed:
            _update(given[place], new)

    def _refer(self, value: Any) -> Any:
        """What stands for an object: whose it is, its number, what it is."""
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
    """A result that is an object, where only plain data is taken."""


def _mutable_by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """What an operation is given and may change, by its number or its name."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {place: value for place, value in places if isinstance(value, _MUTABLE)}


def _error_class(module: str, name: str, bases: tuple[Any, ...]) -> type[BaseException]:
    """The class of an error that the other side defines, or the same one of the standard library."""
    known = (
        getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in sys.stdlib_module_names else None
    )
    if isinstance(known, type) and issubclass(known, BaseException):
        return known
    # Of its other bases nothing is here.
    errors = tuple(base for base in bases if isinstance(base, type) and issubclass(base, BaseException))
    if not errors:
        raise ValueError("an error without a base")
    return type(name, errors, {})


def _made(kind: type[BaseException], details: tuple[Any, ...]) -> BaseException:
    # Not `kind(*details)`: errors of the standard library take other arguments than they keep.
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
    """Make `old` equal to `new` in place, as far down as they are containers of the same kind."""
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
