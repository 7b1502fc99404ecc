"""The Python that programs run under, and where its files are."""

from __future__ import annotations

import compileall
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INSIDE = Path(__file__).parent / "inside"
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32")

# Not -I: the environment is empty but for the hash seed, which makes the order of sets the same in every run.
_FLAGS = ("-B", "-P", "-S", "-s", "-X", "utf8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A Python as a sandbox sees it."""

    command: tuple[str, ...]
    """The executable there, with its flags and the code that starts a role; the role's arguments come after."""
    environment: dict[str, str]
    """All that the environment has."""
    binds: tuple[tuple[str, str], ...]
    """Files and folders of this machine, and where they are there, read-only."""
    links: tuple[tuple[str, str], ...]
    """Links there: where they point, and where they are."""


def interpreter(role: str, *, confined: bool) -> Interpreter:
    """This process's own Python, to run `main` of a module of `rewards.sandbox.inside`.

    Confined, it sees the system's libraries and the standard library, at paths that tell nothing of this machine, but
    no installed package and no other command.
    """
    _compile()
    prefix, executable = sys.base_prefix, os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    there = prefix if prefix.startswith("/usr") or not confined else "/python"
    python = f"{there}/bin/{Path(executable).name}" if confined else executable
    folder = "/d1" if confined else str(_INSIDE.parent)
    present = [path for path in _SYSTEM_LIBRARIES if os.path.isdir(path)]
    binds = {path: path for path in present if not os.path.islink(path)}
    if f"{there}/lib" not in binds:
        binds[f"{prefix}/lib"] = f"{there}/lib"
    binds[executable] = python
    binds[str(_INSIDE)] = f"{folder}/inside"
    return Interpreter(
        command=(python, *_FLAGS, "-c", _start(role, folder)),
        environment={"LD_LIBRARY_PATH": f"{there}/lib", "PYTHONHASHSEED": "0"},
        binds=tuple(binds.items()),
        links=tuple((os.readlink(path), path) for path in present if os.path.islink(path)),
    )


@cache
def _compile() -> None:
    # A sandbox cannot write what it compiles, and would do so at every start.
    compileall.compile_dir(_INSIDE, quiet=2)


def _start(role: str, folder: str) -> str:
    # The packages above are not there, and need not be: they would take 100 ms to import.
    return (
        "import sys\n"
        "for name in ('rewards', 'rewards.sandbox'):\n"
        "    sys.modules[name] = type(sys)(name)\n"
        f"    sys.modules[name].__path__ = [{folder!r}]\n"
        f"from rewards.sandbox.inside import {role}\n"
        f"{role}.main()\n"
    )
