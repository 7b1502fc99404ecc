"""The Python interpreter of the sandbox: its command, environment and file mounts."""

from __future__ import annotations

import compileall
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INSIDE = Path(__file__).parent / "inside"
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32")

# Not -I, which would ignore the hash seed in the environment. The seed makes the order of sets the same in every run.
_FLAGS = ("-B", "-P", "-S", "-s", "-X", "utf8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A Python interpreter as a sandbox sees it."""

    command: tuple[str, ...]
    """The executable in the sandbox, its flags and the code that starts a role; the role's arguments follow."""
    environment: dict[str, str]
    """The complete environment."""
    mounts: tuple[tuple[str, str], ...]
    """(source on this machine, target in the sandbox) of files and folders, mounted read-only."""
    links: tuple[tuple[str, str], ...]
    """(target, path) of symbolic links in the sandbox."""


def interpreter(role: str, *, confined: bool) -> Interpreter:
    """Return this process's own Python, set up to run `main` of a module of `rewards.sandbox.inside`.

    If confined, it sees the system's libraries and the standard library at neutral paths, but no installed package and
    no other command.
    """
    _compile()
    prefix, executable = sys.base_prefix, os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    there = prefix if prefix.startswith("/usr") or not confined else "/python"
    python = f"{there}/bin/{Path(executable).name}" if confined else executable
    folder = "/d1" if confined else str(_INSIDE.parent)
    present = [path for path in _SYSTEM_LIBRARIES if os.path.isdir(path)]
    mounts = {path: path for path in present if not os.path.islink(path)}
    if f"{there}/lib" not in mounts:
        mounts[f"{prefix}/lib"] = f"{there}/lib"
    mounts[executable] = python
    mounts[str(_INSIDE)] = f"{folder}/inside"
    return Interpreter(
        command=(python, *_FLAGS, "-c", _start(role, folder)),
        environment={"LD_LIBRARY_PATH": f"{there}/lib", "PYTHONHASHSEED": "0"},
        mounts=tuple(mounts.items()),
        links=tuple((os.readlink(path), path) for path in present if os.path.islink(path)),
    )


@cache
def _compile() -> None:
    # A sandbox cannot write bytecode, and would compile again at every start.
    compileall.compile_dir(_INSIDE, quiet=2)


def _start(role: str, folder: str) -> str:
    # The parent packages are absent: importing them would take 100 ms.
    return (
        "import sys\n"
        "for name in ('rewards', 'rewards.sandbox'):\n"
        "    sys.modules[name] = type(sys)(name)\n"
        f"    sys.modules[name].__path__ = [{folder!r}]\n"
        f"from rewards.sandbox.inside import {role}\n"
        f"{role}.main()\n"
    )
