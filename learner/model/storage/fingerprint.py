"""Fingerprint of a checkpoint: a quick hash by which another one under the same path is told apart."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from learner.model.checkpoint_files import checkpoint_chain
from learner.model.families.raw_config import CONFIG
from learner.model.hub import ADAPTER_CONFIG
from learner.model.peft_directory.config import is_peft
from learner.model.storage.references import missing_message, read_references

_WEIGHTS = ("*.safetensors", "*.bin")
_SAMPLED_BYTES = 1 << 20


def fingerprint(checkpoint: Path) -> str:
    """Return a hash of the checkpoint's config, and of the size, head and tail of each weight file.

    Raises OSError if they cannot be read, and ValueError if weights that the checkpoint refers to are missing.
    """
    found = list(map(_fingerprint, checkpoint_chain(checkpoint)))
    return found[0] if len(found) == 1 else sha256("".join(found).encode()).hexdigest()[:16]


def _fingerprint(checkpoint: Path) -> str:
    """Return the fingerprint of a single directory."""
    digest = sha256((checkpoint / (ADAPTER_CONFIG if is_peft(checkpoint) else CONFIG)).read_bytes())
    files = {path for pattern in _WEIGHTS for path in checkpoint.glob(pattern)}
    for reference in read_references(checkpoint).values():
        if not reference.path.is_file():
            raise ValueError(missing_message(checkpoint, reference))
        files.add(reference.path)
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]
