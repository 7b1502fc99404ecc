"""Checkpoints: Hugging Face directories, written whole or not at all.

A directory holds `config.json`, the weights and the tokenizer's files, so that the family's original code loads it too.
The weights are `model.safetensors`, or several shards with `model.safetensors.index.json`. d1 adds `manifest.json` (a
checksum of every file) and `trainer_state.json`; a checkpoint of the rounds also has `learner.safetensors`, and one of
an adapter `lora.safetensors`. Nothing is pickled, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner.model.adapter import Adapter, write_adapter
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES, make_model, read_config
from learner.model.raw_config import RawConfig
from learner.model.tokenizer import TOKENIZER_FILES
from learner.model.transformer import Transformer

MANIFEST = "manifest.json"
LEARNER_STATE = "learner.safetensors"
TRAINER_STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# As safetensors names them. Quantised weights mean nothing without their scales.
_DTYPES = ("BF16", "F16", "F32", "F64")
_SHARD_BYTES = 5_000_000_000
# A wrong config.json makes every tensor wrong: so many are named, the others counted.
_MOST_NAMED = 3


def load_policy(directory: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The policy of a checkpoint directory, on the CPU.

    It is read tensor by tensor: more than the policy itself, no more than one tensor is in memory.

    Args:
        directory: where the checkpoint is.
        dtype: what the weights are cast to as they are read.

    Raises:
        ValueError: no checkpoint there, another model family, or a tensor missing, extra or of a wrong shape.
    """
    config = load_config(directory)
    with torch.device("meta"):
        model = make_model(config)
    model.load_state_dict(_load_weights(directory, model, dtype), assign=True)
    return model


def load_config(directory: Path) -> TransformerConfig:
    """The policy's config of a checkpoint directory. Raises ValueError as `load_policy` does."""
    raw = RawConfig.read(directory)
    try:
        return read_config(raw)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{raw.path} makes no policy: a value has a wrong type ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{first['loc'][0]}: " if first["loc"] else ""
        raise ValueError(f"{raw.path} makes no policy: {place}{first['msg'].removeprefix('Value error, ')}") from error


def _load_weights(directory: Path, model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names. Raises ValueError before it reads a tensor if one is not as it should.

    Headers are small and tensors are not, so all headers are checked first.
    """
    checkpoint_name = FAMILIES[model.config.family].checkpoint_name
    names = {checkpoint_name(name): name for name, _ in model.named_parameters()}
    shapes = {checkpoint_name(name): list(parameter.shape) for name, parameter in model.named_parameters()}
    shards = _weight_files(directory)
    headers = {path: _read_header(path) for path in shards}
    owners: dict[str, Path] = {}
    for path, header in headers.items():
        for name in header:
            if owners.setdefault(name, path) != path:
                raise ValueError(f"{name} is in {owners[name]} and in {path}; one of them is of another checkpoint")
    _check_shapes(directory, {name: shape for header in headers.values() for name, shape in header.items()}, shapes)
    weights = {}
    for path in shards:
        with safe_open(path, framework="pt") as file:
            for name in headers[path]:
                # A copy: what is read may be a view of the file, which may change or go.
                weights[names[name]] = file.get_tensor(name).to(dtype, copy=True)
    return weights


def policy_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that are not d1's own: config, weights and tokenizer, as the original code reads them.

    Raises ValueError when there are no weights.
    """
    weights = _weight_files(directory)
    others = [directory / name for name in ("config.json", INDEX, *TOKENIZER_FILES) if (directory / name).is_file()]
    return [*weights, *others]


def _weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors. Raises ValueError when there are none, or the index is no index."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    index = directory / INDEX
    if not index.is_file():
        raise ValueError(f"{directory} is not a checkpoint: it has no {WEIGHTS} and no {INDEX}")
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards: it should be JSON with a weight_map") from error
    for name in files:
        # An index may come from anywhere; what it lists lies beside it.
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(
                f"{index} lists {name}, and there is no such file in {directory}; get the checkpoint again"
            )
    return [directory / name for name in files]


def _read_header(path: Path) -> dict[str, list[int]]:
    """The shapes of a file's tensors by name. Raises ValueError for what is no safetensors file, or not all of it."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            kinds = {name: part.get_dtype() for name, part in slices.items()}
            shapes = {name: list(part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read, get it again: {error}") from error
    for name, kind in kinds.items():
        if kind not in _DTYPES:
            raise ValueError(f"{path}: {name} is {kind}; d1 reads {', '.join(_DTYPES)}, not quantised weights")
    return shapes


def _check_shapes(directory: Path, stored: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    """Raise ValueError that names what differs."""
    wrong = list(_differences(stored, expected))
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise ValueError(f"the weights in {directory} do not fit: {'; '.join(wrong[:_MOST_NAMED])}{more}")


def _differences(stored: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            yield f"there is no {name}; config.json makes {shape}"
        elif stored[name] != shape:
            yield f"{name} is {stored[name]}; config.json makes {shape}"
    for name in sorted(stored.keys() - expected.keys()):
        yield f"{name} is {stored[name]}; config.json makes no such tensor"


def save_checkpoint(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    tokenizer_from: Path,
    *,
    adapter: Adapter | None = None,
    learner_state: Mapping[str, Tensor] | None = None,
    trainer_state: Mapping[str, Any] | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a checkpoint so that `directory` is complete or absent, even if the machine dies in the middle.

    Args:
        directory: where it will be; an earlier checkpoint of that name is replaced.
        config: the policy's shape and family.
        weights: the whole (not sharded) parameters under our names, all of one type; an adapter is merged into them.
        tokenizer_from: a directory whose tokenizer files are copied.
        adapter: the adapter by itself, which training goes on with.
        learner_state: the learner's other tensors by name, for a checkpoint that the rounds resume from.
        trainer_state: where training stood (JSON).
        shard_bytes: weights that take more than this are written as several files of at most this size.

    Raises OSError when it cannot be written; nothing is left of it then.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write_partial(
            partial,
            config,
            weights,
            tokenizer_from,
            adapter=adapter,
            learner_state=learner_state,
            trainer_state=trainer_state,
            shard_bytes=shard_bytes,
        )
    except (OSError, SafetensorError) as error:
        # On a full disk it would be in its own way.
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{directory} cannot be written: {error}") from error
    _put_in_place(partial, directory)


def _put_in_place(partial: Path, directory: Path) -> None:
    """Rename it; an earlier one of that name goes when this one is there."""
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if directory.exists():
        directory.rename(earlier)
    partial.rename(directory)
    _fsync(directory.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _write_partial(
    partial: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    tokenizer_from: Path,
    *,
    adapter: Adapter | None,
    learner_state: Mapping[str, Tensor] | None,
    trainer_state: Mapping[str, Any] | None,
    shard_bytes: int,
) -> None:
    partial.mkdir(parents=True)
    _write_policy(partial, config, weights, shard_bytes)
    if adapter is not None:
        write_adapter(partial, adapter)
    if learner_state is not None:
        save_file({name: tensor.contiguous() for name, tensor in learner_state.items()}, partial / LEARNER_STATE)
    if trainer_state is not None:
        _write_json(partial / TRAINER_STATE, trainer_state)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, partial / name)
    _write_json(partial / MANIFEST, {path.name: _checksum(path) for path in sorted(partial.iterdir())})
    for path in partial.iterdir():
        _fsync(path)
    _fsync(partial)


def verify_checkpoint(directory: Path, names: Collection[str] | None = None) -> None:
    """Check a checkpoint's files against its manifest, all of them or those of `names`.

    Raises ValueError that names the file which differs, or is not there or not listed.
    """
    manifest_path = directory / MANIFEST
    if not manifest_path.is_file():
        raise ValueError(f"{directory} is not a checkpoint that d1 wrote: it has no {MANIFEST}")
    try:
        checksums = dict(json.loads(manifest_path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{manifest_path} is damaged: it lists no checksums") from error
    for name in checksums if names is None else names:
        path = directory / name
        if not path.is_file() or _checksum(path) != checksums.get(name):
            raise ValueError(f"{path} is damaged: it is not what {MANIFEST} lists")


def _write_policy(directory: Path, config: TransformerConfig, weights: Mapping[str, Tensor], shard_bytes: int) -> None:
    """The family's `config.json` and weight files, in the names that its original code knows."""
    family = FAMILIES[config.family]
    named = {family.checkpoint_name(name): tensor for name, tensor in weights.items()}
    (dtype,) = {tensor.dtype for tensor in named.values()}
    raw = family.write_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(directory / "config.json", raw)
    split = split_torch_state_dict_into_shards(named, max_shard_size=shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        shard = {name: named[name].contiguous() for name in names}
        save_file(shard, directory / filename, metadata={"format": "pt"})
    if split.is_sharded:
        _write_json(directory / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
