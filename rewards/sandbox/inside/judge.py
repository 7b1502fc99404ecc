"""The judge process: runs the tests of a problem, out of reach of the tested program."""

from __future__ import annotations

import builtins
import os
import sys
from types import ModuleType

from rewards.sandbox.inside import limits, operations, pytest_shim, wire
from rewards.sandbox.inside.peer import Peer, PeerGone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_ONLY_TREE = 0x400
"""The value of `ast.PyCF_ONLY_AST`."""
_OURS = ("run_test", "candidate")
"""Names that we add for the tests."""
_LONGEST_DETAIL = 300


def main() -> None:
    """Run with arguments: the limits, the descriptor of the suite, the socket to the program. Writes the verdict to
    stdout."""
    spec, suite_fd, channel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    suite = wire.decode(wire.read_all(suite_fd))
    limits.apply(spec)
    verdict_fd = os.dup(1)
    wire.redirect_stdio_to_null()
    peer = Peer(channel, is_allowed=_is_allowed)
    try:
        peer.receive()
    except PeerGone:
        os._exit(1)
    wire.send(verdict_fd, wire.encode(("started",)))
    wire.send(verdict_fd, wire.encode(("judged", *_judge(peer, suite))))
    os._exit(0)


def _judge(peer: Peer, suite: dict[str, Any]) -> tuple[str, tuple[bool, ...], str]:
    """Return `graded` or `error`, which tests passed, and the first failure."""
    none = (False,) * len(suite["tests"])
    try:
        match peer.receive():
            case ("loaded", solution, tuple(names)):
                pass
            case ("failed", str(why)):
                return "graded", none, f"the program does not load: {why}"[:_LONGEST_DETAIL]
            case _:
                return "graded", none, "the program said nothing that could be read"
    except PeerGone:
        return "graded", none, "the program ended before its tests began"
    namespace = _namespace()
    sys.modules["pytest"] = pytest_shim
    try:
        setup = compile(suite["setup"], "tests", "exec", _ONLY_TREE)
        if not suite["entry_point"]:
            _fill(namespace, suite, solution, names, set(_imported(setup.body)))
            peer.has_called = False
        pytest_shim.refuse(suite["setup"])
        exec(compile(setup, "tests", "exec"), namespace)
        if suite["entry_point"]:
            name = suite["entry_point"]
            # HumanEval/33 calls the function by its real name.
            namespace["candidate"] = namespace[name] = getattr(solution, name)
        peer.plain_only = suite["plain_only"]
    except PeerGone:
        return "graded", none, "the program ended before its tests began"
    except BaseException as error:
        kind = "graded" if peer.has_called or _lacks_something(error, suite) else "error"
        return kind, none, f"before the first test: {_said(error)}"[:_LONGEST_DETAIL]
    return _run(peer, suite["tests"], namespace)


def _namespace() -> dict[str, Any]:
    module = ModuleType("tests")
    sys.modules["tests"] = module
    namespace = module.__dict__
    namespace["run_test"] = pytest_shim.runner(namespace)
    return namespace


def _fill(
    namespace: dict[str, Any], suite: dict[str, Any], solution: Any, names: tuple[Any, ...], imported: set[str]
) -> None:
    """Give the tests the program's names: as the module `solution`, or as if the tests were appended to the program.

    A program that defines `set`, `sorted` or `pytest` would decide what the tests compare with. So builtins, and names
    that the tests import from elsewhere, are given only to tests that import them explicitly, or if the program is
    supposed to define them.
    """
    module = ModuleType("solution")
    sys.modules["solution"] = module
    # A hostile program may send any name: `__builtins__` would replace those of the tests.
    bound = [name for name in names if isinstance(name, str) and not name.startswith("__")]
    for name in bound:
        module.__dict__[name] = getattr(solution, name)
    taken = {*dir(builtins), *_OURS, *imported} - set(suite["redefines"])
    given = [name for name in bound if name not in taken]
    # The names of `from solution import *`.
    module.__dict__["__all__"] = [name for name in given if not name.startswith("_")]
    if suite["appended"]:
        namespace.update({name: vars(module)[name] for name in given})


def _imported(statements: list[Any]) -> Iterator[str]:
    """Yield the names that tests import from modules other than the program, without `ast`, which is slow to import."""
    for statement in statements:
        match type(statement).__name__:
            case "Import" | "ImportFrom" if getattr(statement, "module", "") != "solution":
                for one in statement.names:
                    yield (one.asname or one.name).partition(".")[0]
            case "If" | "Try" | "With" | "ExceptHandler":
                for part in ("body", "orelse", "handlers", "finalbody"):
                    yield from _imported(getattr(statement, part, []))


def _lacks_something(error: BaseException, suite: dict[str, Any]) -> bool:
    """Return whether the tests fail because the program does not define something."""
    module = sys.modules.get("solution")
    if isinstance(error, NameError):
        return bool(suite["appended"])
    return (isinstance(error, ImportError) and error.name == "solution") or (
        isinstance(error, AttributeError) and error.obj is module
    )


def _run(peer: Peer, tests: list[str], namespace: dict[str, Any]) -> tuple[str, tuple[bool, ...], str]:
    passed, detail = [], ""
    for test in tests:
        problem = ""
        try:
            exec(compile(test, "tests", "exec"), namespace)
        except pytest_shim.UnsupportedTestError as error:
            return "error", (False,) * len(tests), str(error)[:_LONGEST_DETAIL]
        except BaseException as error:
            problem = _said(error)
        # A test may swallow exceptions of its calls.
        problem = "the program ended" if peer.gone else problem
        passed.append(not problem)
        detail = detail or (f"{test.strip()[:150]}: {problem}" if problem else "")
        if peer.gone:
            passed += [False] * (len(tests) - len(passed))
            break
    return "graded", tuple(passed), detail[:_LONGEST_DETAIL]


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:
        return type(error).__name__


def _is_allowed(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether the program may perform an operation on an object of the tests.

    It may call functions, iterate, and use public names of instances of the tests' own classes. No attribute of a
    function, a generator or a class is accessible, since it could lead further.
    """
    if not args:
        return False
    if name == "call":
        return callable(args[0]) and not isinstance(args[0], ModuleType)
    if name in operations.ATTRIBUTES:
        is_public = len(args) > 1 and isinstance(args[1], str) and not args[1].startswith("_")
        return is_public and type(args[0]).__module__ == "tests" and not isinstance(args[0], type)
    return name in operations.OTHERS or type(args[0]).__module__ == "tests"
