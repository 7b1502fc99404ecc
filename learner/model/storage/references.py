"""References from a checkpoint to weight files elsewhere, instead of copies (`weights.json`).

`weights.json` has the path, SHA-256, size and mtime of each file. A file of the same name in the checkpoint's directory
takes precedence, so a copy of the checkpoint on another machine may contain the files themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from learner.model.storage.hashing import checksum, checksums
from learner.model.storage.throughput import ReportProgress, Throughput

REFERENCES = "weights.json"
_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReference:
    """Reference to one weight file outside the checkpoint."""

    path: Path
    """Absolute path of the file."""
    sha256: str
    """SHA-256 of its content, in hexadecimal."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of its last change, in Unix time (ns)."""

    def is_unchanged(self) -> bool:
        """Whether the file exists with the recorded size and mtime."""
        try:
            about = self.path.stat()
        except OSError:
            return False
        return (about.st_size, about.st_mtime_ns) == (self.size, self.mtime_ns)


def write_references(directory: Path, files: Sequence[Path], report: ReportProgress | None = None) -> None:
    """Write references to weight files into a checkpoint's directory. Hashing reads every file once."""
    progress = Throughput("hashing the checkpoint", sum(path.stat().st_size for path in files), report)
    references = {}
    for path, digest in checksums(files, progress).items():
        about = path.stat()
        # Only the parent is resolved: in the hub's cache the file is a symlink, and its target has another name.
        where = path.parent.resolve() / path.name
        reference = FileReference(path=where, sha256=digest, size=about.st_size, mtime_ns=about.st_mtime_ns)
        references[path.name] = asdict(reference) | {"path": str(where)}
    (directory / REFERENCES).write_text(json.dumps(references, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_references(directory: Path) -> dict[str, FileReference]:
    """Read the files that a checkpoint refers to, by name; a file of that name in its own directory takes precedence.

    Raises ValueError if the list is not as d1 writes it.
    """
    listed = directory / REFERENCES
    if not listed.is_file():
        return {}
    try:
        raw = json.loads(listed.read_text(encoding="utf-8"))
        found = {name: _reference(name, about) for name, about in raw.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{listed} is damaged: it does not list weight files") from error
    beside = {name: directory / name for name in found if (directory / name).is_file()}
    return {name: replace(reference, path=beside.get(name, reference.path)) for name, reference in found.items()}


def _reference(name: str, about: Mapping[str, object]) -> FileReference:
    path, digest, size, mtime_ns = (about[key] for key in ("path", "sha256", "size", "mtime_ns"))
    if not (isinstance(path, str) and isinstance(digest, str) and isinstance(size, int) and isinstance(mtime_ns, int)):
        raise TypeError(name)
    where = Path(path)
    if Path(name).name != name or where.name != name or where.suffix != _SUFFIX or not where.is_absolute():
        raise ValueError(name)
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(name)
    return FileReference(path=where, sha256=digest, size=size, mtime_ns=mtime_ns)


def missing_message(directory: Path, reference: FileReference) -> str:
    """Make the error message for a missing file."""
    return (
        f"{directory} refers to {reference.path} for its weights, and this machine has no such file; put it back, or "
        "start a new run"
    )


def check_unchanged(directory: Path) -> None:
    """Raise ValueError if a file outside the checkpoint that it refers to is missing or was changed.

    A file with the recorded size and mtime is not read.
    """
    for reference in read_references(directory).values():
        if reference.path.parent == directory:
            continue
        if not reference.path.is_file():
            raise ValueError(missing_message(directory, reference))
        if not reference.is_unchanged() and checksum(reference.path) != reference.sha256:
            raise ValueError(changed_message(directory, reference))


def changed_message(directory: Path, reference: FileReference) -> str:
    """Make the error message for a changed file."""
    return (
        f"{reference.path} was changed since {directory} was made, which refers to it for its weights; put the "
        "original file back, or start a new run"
    )
