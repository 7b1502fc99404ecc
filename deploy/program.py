"""Name and version of this program, so that the commands it prints can be run as printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

_NAME = "d1"
UNKNOWN = "unknown"
"""Version of a package without metadata: one that is not installed, or d1 itself on a bare `PYTHONPATH`."""


def program() -> str:
    """Return `d1` if the PATH finds this installation, else the path of its script, relative if that is shorter."""
    called = Path(sys.argv[0])
    script = called if called.name == _NAME and called.is_file() else Path(sysconfig.get_path("scripts"), _NAME)
    found = shutil.which(_NAME)
    if not script.is_file() or (found is not None and os.path.samefile(found, script)):
        return _NAME
    from_here = os.path.relpath(script)
    # Without a slash a shell would look for it on the PATH.
    from_here = from_here if os.sep in from_here else os.path.join(os.curdir, from_here)
    return shlex.quote(min(from_here, os.path.abspath(script), key=len))


def version_of(package: str) -> str:
    """Return the version of an installed package, or `UNKNOWN`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def command(*words: str) -> str:
    """Format a whole command, quoted for a shell."""
    return f"{program()} {shlex.join(words)}"
