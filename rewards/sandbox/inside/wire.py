"""Safe serialization between processes that do not trust each other: decoding runs no code.

A value is a tag and its content. Plain data is encoded by value. Anything else (a function, an instance of a custom
class) is encoded as the reference that `refer` returns for it. Decoding takes bounded depth and memory, and calls only
the types listed here. Imports nothing slow, because a sandbox starts for every program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_BYTES = 16 * 2**20
"""Maximum size of a message."""
_MAX_DEPTH = 100
_HEADER = 4

# Further standard types by name, with the arguments of their constructors.
_NAMED: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.bytearray": lambda v: (bytes(v),),
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "collections.Counter": lambda v: (dict(v),),
    "collections.OrderedDict": lambda v: (list(v.items()),),
    "collections.defaultdict": lambda v: (None, dict(v)),
    "collections.deque": lambda v: (list(v), v.maxlen),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.datetime": lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
    "datetime.time": lambda v: (v.hour, v.minute, v.second, v.microsecond),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "uuid.UUID": lambda v: (str(v),),
}
_CONTAINERS: dict[bytes, Callable[[Any], Any]] = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}
_TAGS = {kind: tag for tag, kind in _CONTAINERS.items()}

if TYPE_CHECKING:
    Refer = Callable[[Any], Any]


def _no_references(value: Any) -> Any:
    raise ValueError(f"a {type(value).__name__} is no plain data")


def encode(value: Any, refer: Refer = _no_references) -> bytes:
    """Encode a value. Raises ValueError if it is too deep or too large, and what `refer` raises."""
    writer = _Encoder(refer)
    writer.put(value, 0)
    return b"".join(writer.parts)


def decode(data: bytes, resolve: Refer = _no_references) -> Any:
    """Decode untrusted bytes; `resolve` turns references into objects.

    Raises ValueError (and whatever the constructors of the listed types raise) if they do not encode a value.
    """
    reader = _Decoder(data, resolve)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError("bytes are left over")
    return value


class _Encoder:
    def __init__(self, refer: Refer) -> None:
        self.parts: list[bytes] = []
        self._size = 0
        self._refer = refer

    def put(self, value: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("the value is too deep")
        kind = type(value)
        if value is None or kind is bool:
            self._add(b"N" if value is None else b"T" if value else b"F", b"")
        elif kind is str:
            self._add(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind in _TAGS:
            self._items(_TAGS[kind], value, depth)
        elif kind is dict:
            self._items(b"d", [part for item in value.items() for part in item], depth)
        elif isinstance(value, (int, float, complex, str, bytes)):
            self._scalar(value)
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            self._items(b"n", [kind.__name__, *kind._fields, *tuple(value)], depth)
        elif (name := f"{kind.__module__}.{kind.__qualname__}") in _NAMED and getattr(value, "tzinfo", None) is None:
            self._items(b"x", [name, *_NAMED[name](value)], depth)
        else:
            self._items(b"r", [self._refer(value)], depth)

    def _scalar(self, value: Any) -> None:
        """Encode a scalar; an instance of a subclass, such as an `IntEnum`, by its plain value."""
        if isinstance(value, int):
            # Hexadecimal, because Python refuses long decimals, and converting them takes quadratic time.
            self._add(b"i", format(int(value), "x").encode())
        elif isinstance(value, float):
            self._add(b"f", float.hex(float(value)).encode())
        elif isinstance(value, complex):
            self._add(b"c", f"{value.real.hex()} {value.imag.hex()}".encode())
        elif isinstance(value, str):
            self._add(b"s", str.__str__(value).encode("utf-8", "surrogatepass"))
        else:
            self._add(b"b", bytes(value))

    def _items(self, tag: bytes, values: Any, depth: int) -> None:
        self._count(tag, len(values))
        for item in values:
            self.put(item, depth + 1)

    def _add(self, tag: bytes, content: bytes) -> None:
        self._count(tag, len(content))
        self._size += len(content)
        self.parts.append(content)

    def _count(self, tag: bytes, count: int) -> None:
        head = b"%b%x:" % (tag, count)
        self._size += len(head)
        # A list that contains itself twice would double at each depth.
        if self._size + count > MAX_BYTES:
            raise ValueError("the value is too large")
        self.parts.append(head)


class _Decoder:
    def __init__(self, data: bytes, resolve: Refer) -> None:
        self.at = 0
        self._data = data
        self._resolve = resolve

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("the value is too deep")
        tag = self._data[self.at : self.at + 1]
        colon = self._data.index(b":", self.at, self.at + 16)
        count = int(self._data[self.at + 1 : colon], 16)
        self.at = colon + 1
        # Every item takes at least two bytes, so a larger count is invalid.
        if count < 0 or self.at + count > len(self._data):
            raise ValueError("bytes are missing")
        return self._scalar(tag, count) if tag in b"NTFifcsb" else self._compound(tag, count, depth)

    def _scalar(self, tag: bytes, count: int) -> Any:
        content = self._data[self.at : self.at + count]
        self.at += count
        match tag:
            case b"N" | b"T" | b"F":
                return None if tag == b"N" else tag == b"T"
            case b"i":
                return int(content, 16)
            case b"f":
                return float.fromhex(content.decode())
            case b"c":
                real, imag = content.decode().split(" ")
                return complex(float.fromhex(real), float.fromhex(imag))
            case b"s":
                return content.decode("utf-8", "surrogatepass")
            case _:
                return content

    def _compound(self, tag: bytes, count: int, depth: int) -> Any:
        items = [self.value(depth + 1) for _ in range(count)]
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](items)
        if tag == b"d":
            return dict(zip(items[::2], items[1::2], strict=True))
        if tag == b"x" and items and items[0] in _NAMED:
            module, _, name = items[0].rpartition(".")
            return getattr(__import__(module), name)(*items[1:])
        if tag == b"n":
            return _named_tuple(items)
        if tag == b"r" and count == 1:
            return self._resolve(items[0])
        raise ValueError(f"there is no tag {tag!r}")


def _named_tuple(items: list[Any]) -> Any:
    from collections import namedtuple

    name, half = items[0], (len(items) - 1) // 2
    # `namedtuple` rejects names that are not identifiers.
    return namedtuple(name, items[1 : half + 1])(*items[half + 1 :])


def send(fd: int, message: bytes) -> None:
    """Write a message. Raises OSError if the reading end is closed."""
    data = memoryview(len(message).to_bytes(_HEADER, "big") + message)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> bytes | None:
    """Return the next message; None if the other side is gone or announces a message that is too long."""
    header = _exactly(fd, _HEADER)
    if header is None or (size := int.from_bytes(header, "big")) > MAX_BYTES:
        return None
    return _exactly(fd, size)


def _exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        try:
            part = os.read(fd, min(count, 65_536))
        except OSError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_all(fd: int) -> bytes:
    """Read the rest of a file and close it."""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def redirect_stdio_to_null() -> None:
    """Redirect standard input, output and error of this process to /dev/null."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    sys.stdin = open(0)  # noqa: SIM115 (for as long as the process)
