"""Minimal replacement of pytest for tests of single functions, without its import time of 200 ms."""

from __future__ import annotations

import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class UnsupportedTestError(BaseException):
    """A test needs an unsupported feature of pytest, so that it says nothing about the program."""


class FailedError(AssertionError):
    """Raised by `pytest.fail`, or by `raises` if there was no error."""


def __getattr__(name: str) -> Any:
    raise UnsupportedTestError(f"the tests use pytest.{name}, which is not supported here")


class raises:  # noqa: N801 (pytest's name)
    """`pytest.raises`."""

    value: Any = None

    def __init__(self, expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> None:
        self._expected, self._match = expected, match
        if args:
            with self:
                args[0](*args[1:], **kwargs)

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: object) -> bool:
        if kind is None:
            raise FailedError(f"{self._expected} was not raised")
        if not issubclass(kind, self._expected):
            return False
        if self._match is not None:
            import re

            if not re.search(self._match, str(error)):
                raise FailedError(f"{self._match!r} is not in {str(error)!r}")
        self.value, self.type = error, kind
        return True


class approx:  # noqa: N801 (pytest's name)
    """`pytest.approx` for numbers, and for sequences and mappings of numbers."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:  # noqa: A002
        self._expected = expected
        self._rel = 1e-6 if rel is None and abs is None else rel or 0.0
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, actual: object) -> bool:
        return self._is_close(self._expected, actual)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _is_close(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and expected.keys() == actual.keys()
                and all(self._is_close(expected[key], actual[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(expected) == len(actual)
                and all(map(self._is_close, expected, actual))
            )
        if isinstance(expected, (int, float)) and isinstance(actual, (int, float)):
            return math.isclose(actual, expected, rel_tol=self._rel, abs_tol=self._abs)
        return bool(expected == actual)


def fail(reason: str = "", **_: Any) -> None:
    """`pytest.fail`."""
    raise FailedError(reason)


class _Marks:
    """`pytest.mark`: `parametrize` is implemented, other marks have no effect."""

    def parametrize(self, names: str | list[str], values: Any, **_: Any) -> Callable[[Any], Any]:
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def mark(test: Any) -> Any:
            cases = [dict(zip(split, [value] if len(split) == 1 else value, strict=True)) for value in values]
            test.d1_cases = [{**old, **new} for old in getattr(test, "d1_cases", [{}]) for new in cases]
            return test

        return mark

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: args[0] if len(args) == 1 and callable(args[0]) else lambda test: test


mark = _Marks()


def fixture(function: Any = None, **_: Any) -> Any:
    """`pytest.fixture`, without scopes and parameters."""
    if function is None:
        return fixture
    function.d1_fixture = True
    return function


# These would run but behave differently here: the program is in another process, and classes and modules are not set
# up.
_NEEDS = (
    "unittest.mock",
    "unittest import mock",
    "redirect_stdout",
    "redirect_stderr",
    "sys.stdout =",
    "autouse=True",
    "def setup_class",
    "def setup_module",
    "def setup_function",
    "def setUpClass",
    "def setUpModule",
)


def refuse(tests: str) -> None:
    """Raise `UnsupportedTestError` for tests that use unsupported features which would not fail by themselves."""
    for need in _NEEDS:
        if need in tests:
            raise UnsupportedTestError(f"the tests have `{need}`, which is not supported here")


_IS_GENERATOR = 0x20


def _parameters(function: Any) -> tuple[str, ...]:
    """Return the parameter names of a function or bound method. (`inspect` takes 15 ms to import.)"""
    code = function.__code__
    return code.co_varnames[int(hasattr(function, "__self__")) : code.co_argcount]


def _prepare(test: Any) -> None:
    """Call the setup methods of a test method's object."""
    for name in ("setup_method", "setUp"):
        method = getattr(getattr(test, "__self__", None), name, None)
        if method is not None:
            method(test) if _parameters(method) else method()


def runner(namespace: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that calls a test with its fixtures, once for each of its parameter sets."""

    def value(name: str) -> Any:
        made: Any = namespace.get(name)
        if not getattr(made, "d1_fixture", False):
            raise UnsupportedTestError(f"the tests use the fixture {name}, which is not supported here")
        given = {needed: value(needed) for needed in _parameters(made)}
        result = made(**given)
        return next(result) if made.__code__.co_flags & _IS_GENERATOR else result

    def run(test: Any) -> None:
        for case in getattr(test, "d1_cases", [{}]):
            _prepare(test)
            needed = [name for name in _parameters(test) if name not in case]
            test(**{name: value(name) for name in needed}, **case)

    return run
