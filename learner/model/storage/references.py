"""Weight files that a checkpoint refers to where they are, instead of holding a copy.

`weights.json` says for each file where it is, its SHA-256, its size and when it was last changed. A file of that name
beside it counts instead: so a copy of the whole checkpoint on another machine may hold the files themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from learner.model.storage.hashing import checksum, checksums
from learner.model.storage.throughput import Say, Throughput

REFERENCES = "weights.json"
_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One weight file that is elsewhere."""

    path: Path
    """Where it is; absolute."""
    sha256: str
    """Of its content, in hexadecimal."""
    size: int
    """In bytes."""
    mtime_ns: int
    """When it was last changed, in unix time."""

    def is_as_it_was(self) -> bool:
        """Whether the file has the size and the time of change that it had; where it is not there, it has not."""
        try:
            about = self.path.stat()
        except OSError:
            return False
        return (about.st_size, about.st_mtime_ns) == (self.size, self.mtime_ns)


def write_references(directory: Path, files: Sequence[Path], say: Say | None = None) -> None:
    """Refer to weight files from a checkpoint's directory. They are hashed, which takes as long as they are large."""
    progress = Throughput("hashing the checkpoint", sum(path.stat().st_size for path in files), say)
    references = {}
    for path, digest in checksums(files, progress).items():
        about = path.stat()
        # Not the file itself: in the cache of the hub that is a link, and what it points to has another name.
        where = path.parent.resolve() / path.name
        reference = Reference(path=where, sha256=digest, size=about.st_size, mtime_ns=about.st_mtime_ns)
        references[path.name] = asdict(reference) | {"path": str(where)}
    (directory / REFERENCES).write_text(json.dumps(references, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_references(directory: Path) -> dict[str, Reference]:
    """The files that a checkpoint refers to, by name; where it holds one itself, that.

    Raises ValueError where its list is not what d1 writes.
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


def _reference(name: str, about: Mapping[str, object]) -> Reference:
    path, digest, size, mtime_ns = (about[key] for key in ("path", "sha256", "size", "mtime_ns"))
    if not (isinstance(path, str) and isinstance(digest, str) and isinstance(size, int) and isinstance(mtime_ns, int)):
        raise TypeError(name)
    where = Path(path)
    if Path(name).name != name or where.name != name or where.suffix != _SUFFIX or not where.is_absolute():
        raise ValueError(name)
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(name)
    return Reference(path=where, sha256=digest, size=size, mtime_ns=mtime_ns)


def why_gone(directory: Path, reference: Reference) -> str:
    """What is wrong where a file is not where it should be, in a sentence."""
    return (
        f"{directory} refers to {reference.path} for its weights, and this machine has no such file; put it back, or "
        "start a new run"
    )


def check_unchanged(directory: Path) -> None:
    """Raise ValueError, which names it, where a file elsewhere that a checkpoint refers to is gone or was changed.

    One that has its size and time of change is not read.
    """
    for reference in read_references(directory).values():
        if reference.path.parent == directory:
            continue
        if not reference.path.is_file():
            raise ValueError(why_gone(directory, reference))
        if not reference.is_as_it_was() and checksum(reference.path) != reference.sha256:
            raise ValueError(why_changed(directory, reference))


def why_changed(directory: Path, reference: Reference) -> str:
    """What is wrong where a file is another than it was, in a sentence."""
    return (
        f"{reference.path} was changed since {directory} was made, which refers to it for its weights; put the "
        "original file back, or start a new run"
    )
