"""Files of a checkpoint directory: config, weights, chain of base checkpoints, checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from learner.model.config import TransformerConfig
from learner.model.families import read_config
from learner.model.families.raw_config import CONFIG, GENERATION_CONFIG, RawConfig
from learner.model.hub import ADAPTER_CONFIG, find_checkpoint, find_tokenizer
from learner.model.lora_config import BaseWeights
from learner.model.peft_directory.config import find_base, is_peft
from learner.model.storage.hashing import checksums
from learner.model.storage.references import changed_message, missing_message, read_references
from learner.model.storage.throughput import ReportProgress, Throughput
from learner.model.tokenizer import TOKENIZER_FILES, ChatTokenizer

MANIFEST = "manifest.json"
LEARNER_STATE = "learner.safetensors"
MODEL, LEARNER = "model", "learner"
"""What the ranks of a learner write in shards: the policy's weights, and the learner's state."""
TRAINER_STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "lora.safetensors"
ADAPTER_METADATA_KEY = "d1"
"""Metadata key of `lora.safetensors`: JSON with the fields of `Adapter` except its matrices."""
_GENERATION_KEYS = ("max_new_tokens", "block_length", "steps_per_block")


def load_config(directory: Path) -> TransformerConfig:
    """Read the policy's config from a checkpoint directory or from a peft adapter's base. Raises as `load_policy`."""
    source = _peft_chain(directory, partial(find_checkpoint, config_only=True))[-1]
    if source == directory:
        return _own_config(directory)
    try:
        return _own_config(source)
    except ValueError as error:
        raise ValueError(f"the base of the adapter in {directory} cannot be used: {error}") from error


def _own_config(directory: Path) -> TransformerConfig:
    """Read the config of a directory that has a `config.json`. Raises as `load_policy`."""
    if not (directory / CONFIG).is_file() and (inside := sorted(directory.glob(f"*/{ADAPTER_CONFIG}"))):
        raise ValueError(f"{directory} is not a checkpoint: it has no {CONFIG}; {inside[0].parent} holds an adapter")
    raw = RawConfig.read(directory)
    try:
        return read_config(raw)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{raw.path} makes no policy: a value has a wrong type ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{first['loc'][0]}: " if first["loc"] else ""
        raise ValueError(f"{raw.path} makes no policy: {place}{first['msg'].removeprefix('Value error, ')}") from error


def _peft_chain(directory: Path, find: Callable[[Path | str], Path]) -> list[Path]:
    """List a directory and, after each peft adapter, its base. `find` and the errors are those of `find_base`."""
    chain = [directory]
    while is_peft(chain[-1]):
        base = find_base(chain[-1], find)
        if any(base.samefile(other) for other in chain):
            raise ValueError(f"the adapter in {chain[-1]} stands on {base}, which stands on it")
        chain.append(base)
    return chain


def has_adapter(directory: Path) -> bool:
    """Whether a checkpoint is an adapter, d1's own or peft's, on a base checkpoint."""
    return (directory / ADAPTER).is_file() or is_peft(directory)


def open_tokenizer(directory: Path) -> ChatTokenizer:
    """Load the tokenizer of a checkpoint directory; for a peft adapter, its own if it has one, else its base's.

    Raises ValueError if there is none, or if a peft adapter's has more tokens than its base embeds.
    """
    source = tokenizer_directory(directory)
    tokenizer = ChatTokenizer(source)
    if is_peft(source) and len(tokenizer) > (vocab_size := load_config(source).vocab_size):
        raise ValueError(
            f"the tokenizer in {source} has {len(tokenizer)} tokens, and the base of the adapter there embeds "
            f"{vocab_size}; remove it, and the base's is used"
        )
    return tokenizer


def tokenizer_directory(directory: Path) -> Path:
    """Find the directory of a checkpoint's tokenizer files. Raises ValueError as `find_base`."""
    chain = _peft_chain(directory, find_tokenizer)
    having = (one for one in chain if any((one / name).is_file() for name in TOKENIZER_FILES))
    return next(having, chain[-1])


def generation_defaults(directory: Path) -> dict[str, int]:
    """Read `max_new_tokens`, `block_length` and `steps_per_block` of `generation_config.json`, those that it has.

    A peft adapter's own file comes before its base's. Raises ValueError if the file is damaged or a value is not a
    positive whole number.
    """
    found: dict[str, int] = {}
    for one in _peft_chain(directory, find_tokenizer):
        generation = RawConfig(one / CONFIG, {}).generation
        for key in _GENERATION_KEYS:
            value = generation.get(key)
            if value is None or key in found:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{one / GENERATION_CONFIG} has {key} {value!r}; it is a whole number from 1")
            found[key] = value
    return found


def policy_files(directory: Path) -> list[Path]:
    """List the files of a checkpoint that the original code reads: config, weights and tokenizer.

    Raises ValueError if there are no weights.
    """
    weights = weight_files(directory)
    others = (CONFIG, GENERATION_CONFIG, INDEX, *TOKENIZER_FILES)
    return [*weights, *(directory / name for name in others if (directory / name).is_file())]


def weight_files(directory: Path) -> list[Path]:
    """List the files that hold a checkpoint's tensors, in its directory or elsewhere by reference.

    Raises ValueError if there are none, one is missing, or the index is invalid.
    """
    if shards := shard_files(directory, MODEL):
        return shards
    elsewhere = read_references(directory)
    index = directory / INDEX
    if (directory / WEIGHTS).is_file() or WEIGHTS in elsewhere:
        names = [WEIGHTS]
    elif not index.is_file():
        raise ValueError(f"{directory} is not a checkpoint: it has no {WEIGHTS} and no {INDEX}")
    else:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of shards: it should be JSON with a weight_map") from error
    files = []
    for name in names:
        # An index is untrusted: its files must be in its directory, or at the paths that d1 recorded in `weights.json`.
        path = elsewhere[name].path if name in elsewhere else directory / name
        if name in elsewhere and not path.is_file():
            raise ValueError(missing_message(directory, elsewhere[name]))
        if Path(name).name != name or not path.is_file():
            raise ValueError(
                f"{index} lists {name}, and there is no such file in {directory}; get the checkpoint again"
            )
        files.append(path)
    return files


def shard_name(kind: str, rank: int, num_ranks: int) -> str:
    """Return the name of the file in which a rank writes its rows of `MODEL` or `LEARNER`."""
    return f"{kind}.rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


def shard_files(directory: Path, kind: str) -> list[Path]:
    """List the shards of `MODEL` or `LEARNER` in a checkpoint's directory; none if it is whole."""
    return sorted(directory.glob(f"{kind}.rank-*.safetensors"))


def learner_files(directory: Path) -> list[Path]:
    """List the files with the learner's state of a checkpoint within a stage; none before its first step."""
    whole = directory / LEARNER_STATE
    return [whole] if whole.is_file() else shard_files(directory, LEARNER)


def weight_bytes(directory: Path) -> int:
    """Return the size of a checkpoint's weights on disk; 0 if it has none."""
    try:
        return sum(path.stat().st_size for path in weight_files(directory))
    except (ValueError, OSError):
        return 0


def max_float32_bytes(directory: Path) -> int:
    """Return an upper bound on the weights' size in float32: twice their size on disk, as they may be in bfloat16.

    0 if there are none.
    """
    return 2 * weight_bytes(directory)


def adapter_base(directory: Path) -> Path:
    """Find the base checkpoint of the adapter in a checkpoint's directory. Raises ValueError if it is missing."""
    name = str(_adapter_metadata(directory)["base"])
    base = directory.parent / name
    if not _is_plain(name) or base == directory or not base.is_dir():
        raise ValueError(f"the adapter in {directory} stands on {name}, which is no checkpoint beside it")
    return base


def _adapter_metadata(directory: Path) -> dict[str, Any]:
    """Read the metadata of an adapter's file. Raises ValueError if d1 did not write it."""
    path = directory / ADAPTER
    try:
        # numpy: reading a name does not need torch.
        with safe_open(path, framework="numpy") as file:
            about = dict(json.loads(file.metadata()[ADAPTER_METADATA_KEY]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no adapter that d1 wrote: {error}") from error
    if "base" not in about:
        raise ValueError(f"{path} is no adapter that d1 wrote: it names no base checkpoint")
    return about


def _is_plain(name: str) -> bool:
    """Whether a name is a plain file name, without directories."""
    return Path(name).name == name and name not in ("", ".", "..")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseCheckpoint:
    """Reference to an adapter's base checkpoint in the same run, which every machine of the run can read."""

    checkpoint: str
    """Name of its directory."""
    digest: str
    """The `chain_digest` of that directory."""
    scaling: float
    """Multiplier of B A."""
    base_weights: BaseWeights = "full"
    """Format of the frozen weights: `nf4` rounds them to 4 bits."""

    def directory(self, checkpoints_dir: Path) -> Path:
        """Return the base checkpoint's directory. Raises ValueError if it is missing or its digest differs."""
        directory = checkpoints_dir / self.checkpoint
        if not _is_plain(self.checkpoint) or not directory.is_dir():
            raise ValueError(f"the base checkpoint {self.checkpoint} of an adapter is not in {checkpoints_dir}")
        if chain_digest(directory) != self.digest:
            raise ValueError(f"{directory} is not the checkpoint that the adapter was trained on: its manifest differs")
        return directory


def chain_digest(directory: Path) -> str:
    """Compute an identifier of a checkpoint's policy: the SHA-256 of its manifest and its base checkpoints' manifests.

    Raises ValueError if one of them has no manifest.
    """
    return _digest_of(checkpoint_chain(directory))


def _digest_of(chain: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for one in chain:
        try:
            digest.update((one / MANIFEST).read_bytes())
        except OSError as error:
            raise ValueError(f"{one} is not a checkpoint that d1 wrote: it has no {MANIFEST}") from error
    return digest.hexdigest()


def checkpoint_chain(directory: Path) -> list[Path]:
    """List a checkpoint and its base checkpoints, down to the one that has the weights.

    Raises ValueError if one is missing or not the one that an adapter was trained on, or if the last of several has no
    weights.
    """
    chain, expected = [directory], list[str | None]()
    while has_adapter(chain[-1]):
        is_of_peft = is_peft(chain[-1])
        base = find_base(chain[-1]) if is_of_peft else adapter_base(chain[-1])
        if any(base.samefile(other) for other in chain):
            raise ValueError(f"the adapter in {chain[-1]} stands on {base.name}, which stands on it")
        expected.append(None if is_of_peft else _adapter_metadata(chain[-1]).get("base_digest"))
        chain.append(base)
    for index, digest in enumerate(expected, start=1):
        if digest is not None and digest != _digest_of(chain[index:]):
            raise ValueError(
                f"the adapter in {chain[index - 1]} was trained on another {chain[index].name} than {chain[index]}, "
                "whose manifest differs"
            )
    if len(chain) > 1:
        weight_files(chain[-1])
    return chain


def verify_checkpoint(
    directory: Path, names: Collection[str] | None = None, report: ReportProgress | None = None
) -> None:
    """Check a checkpoint's files against its manifest: all of them, or those of `names`.

    Without `names` this includes referenced weight files and the base checkpoints. Files are read in several threads;
    `report` receives progress messages with the rate.

    Raises ValueError that names the file which differs, is missing, or is not listed.
    """
    verify_own_files(directory, names, report)
    if names is None:
        for base in checkpoint_chain(directory)[1:]:
            verify_own_files(base, report=report)


def verify_own_files(
    directory: Path, names: Collection[str] | None = None, report: ReportProgress | None = None
) -> None:
    """Check a checkpoint's files as `verify_checkpoint` does, without its base checkpoints."""
    listed = _read_manifest(directory)
    expected = {directory / name: listed.get(name) for name in (listed if names is None else names)}
    elsewhere = read_references(directory) if names is None else {}
    for path, digest in expected.items():
        if digest is None or not path.is_file():
            raise ValueError(_damaged_message(path))
    for reference in elsewhere.values():
        if not reference.path.is_file():
            raise ValueError(missing_message(directory, reference))
    paths = [*expected, *(reference.path for reference in elsewhere.values())]
    found = checksums(
        paths, Throughput(f"checking {directory.name}", sum(path.stat().st_size for path in paths), report)
    )
    for path, digest in expected.items():
        if found[path] != digest:
            raise ValueError(_damaged_message(path))
    for reference in elsewhere.values():
        if found[reference.path] != reference.sha256:
            raise ValueError(changed_message(directory, reference))


def _read_manifest(directory: Path) -> dict[str, str]:
    """Read the checksums of a checkpoint's files by name. Raises ValueError if its manifest is missing or damaged."""
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is not a checkpoint that d1 wrote: it has no {MANIFEST}")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: it lists no checksums") from error


def _damaged_message(path: Path) -> str:
    return f"{path} is damaged: it is not what {MANIFEST} lists"
