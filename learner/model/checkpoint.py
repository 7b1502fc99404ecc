"""Checkpoints: atomically written Hugging Face directories.

A directory holds `config.json`, the weights and the tokenizer's files, so that the family's original code loads it too.
The weights are `model.safetensors`, or several shards with `model.safetensors.index.json`. d1 adds `manifest.json` (a
checksum of every file) and `trainer_state.json`. A checkpoint of the rounds also has `learner.safetensors`.

Of a learner with several ranks, each rank writes its rows into files of its own (`learner/parallel/sharded_saving.py`).
Only d1 reads a checkpoint whose weights are in such shards; `d1 export` makes whole ones of it.

A checkpoint of a LoRA run has `lora.safetensors` instead of weights: its policy is that of the base checkpoint, a
sibling directory, with the adapter. A checkpoint with `weights.json` refers to weight files elsewhere. Nothing is
pickled, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from learner.model.adapter import Adapter, attach_adapters, check_peft_copies, read_chain, write_adapter
from learner.model.checkpoint_files import (
    INDEX,
    LEARNER_STATE,
    MANIFEST,
    TRAINER_STATE,
    checkpoint_chain,
    load_config,
    weight_files,
)
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.families.raw_config import CONFIG, GENERATION_CONFIG
from learner.model.lora import merge_adapters
from learner.model.lora_config import BaseWeights
from learner.model.networks import make_meta_model, parameter_dtypes
from learner.model.quantization.nf4 import linear_layers, set_dequantized
from learner.model.storage.hashing import checksums
from learner.model.storage.references import write_references
from learner.model.storage.throughput import ReportProgress
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import TOKENIZER_FILES
from learner.model.transformer import Transformer

_SHARD_BYTES = 5_000_000_000


def load_policy(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    report: ReportProgress | None = None,
) -> Transformer:
    """Load the policy of a checkpoint directory; its adapters are not merged.

    Files are read directly into the policy's memory. Beyond the policy this takes only small buffers.

    Args:
        directory: the checkpoint's directory.
        dtype: type that the weights are cast to while they are read; a router's bias stays in float32.
        device: device of the weights.
        report: receives progress messages with the rate of reading.

    Raises:
        ValueError: there is no checkpoint, its family is unknown, or a tensor is missing, extra or of a wrong shape.
    """
    chain = read_chain(directory)
    base_weights = "full" if chain.adapter is None else chain.adapter.base_weights
    model = load_weights(chain.weights, dtype, device, report, base_weights=base_weights)
    if chain.adapter is not None:
        # Compared with the stored weights: rounding to 4 bits loses information.
        check_peft_copies(directory, StoredWeights(chain.weights))
        try:
            attach_adapters(model, chain.adapter.matrices, chain.adapter.scaling, chain.start)
        except ValueError as error:
            raise ValueError(f"the adapter in {directory} cannot be used: {error}") from error
    return model


def load_weights(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    report: ReportProgress | None = None,
    *,
    base_weights: BaseWeights = "full",
) -> Transformer:
    """Load the policy of a checkpoint that has its own weights, rounded to 4 bits if `base_weights` is `nf4`.

    The other arguments and the errors are those of `load_policy`.
    """
    weights = StoredWeights(directory)
    model, held = make_meta_model(weights.config), parameter_dtypes(weights.config, dtype)
    whole = {
        name: torch.empty(tuple(stored.shape), dtype=held[name], device=device) for name, stored in weights.items()
    }
    weights.read_into(whole, report=report)
    model.load_state_dict(whole, assign=True)
    if base_weights == "nf4":
        round_weights(model, directory, report)
    return model


def round_weights(model: Transformer, directory: Path, report: ReportProgress | None = None) -> None:
    """Round the linear layers of the blocks to 4 bits, in place, as a learner with `base_weights: nf4` does.

    Rounds from the weights in `directory`, the checkpoint that the policy was loaded from. Raises ValueError if
    bitsandbytes is missing.
    """
    layers = linear_layers(model)
    for name, weight in StoredWeights(directory).iter_float32([f"{name}.weight" for name in layers], report):
        set_dequantized(layers[name.removesuffix(".weight")], weight)


def load_merged(directory: Path, report: ReportProgress | None = None) -> Transformer:
    """Load a policy with its adapters merged into its weights, in float32, on the CPU, for export to the original code.

    Raises as `load_policy`.
    """
    model = load_policy(directory, report=report)
    merge_adapters(model)
    return model


def empty_policy(directory: Path, dtype: torch.dtype, device: str | torch.device) -> Transformer:
    """Make a policy of a checkpoint's shape with uninitialized weights. Raises ValueError if its config is invalid."""
    return make_meta_model(load_config(directory)).to(dtype).to_empty(device=device)


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the type to hold a checkpoint's weights in: bfloat16 if all are stored in it, else float32.

    A router's bias does not count: every policy holds it in float32. For a checkpoint with adapters it is float32.
    Raises ValueError as `load_policy` does.
    """
    *adapted, weights = checkpoint_chain(directory)
    return torch.float32 if adapted else StoredWeights(weights).dtype


def save_checkpoint(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor] | StoredWeights | None,
    tokenizer_from: Path,
    *,
    adapter: Adapter | None = None,
    learner_state: Mapping[str, Tensor] | None = None,
    trainer_state: Mapping[str, Any] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    link_own_files: bool = False,
    shards: Mapping[str, str] | None = None,
    report: ReportProgress | None = None,
) -> None:
    """Write a checkpoint atomically: `directory` is complete or absent, even if the machine crashes.

    Args:
        directory: where the checkpoint is written; an existing one there is replaced.
        config: the policy's shape and family.
        weights: the unsharded parameters under our names, all of one type except routers' biases, which are in float32.
            For `StoredWeights`, the files are hashed and referred to in place. None: the policy is that of the
            adapter's base, with the adapter.
        tokenizer_from: a directory whose tokenizer files are copied.
        adapter: the stage's adapter, in a LoRA run.
        learner_state: the learner's other tensors by name, for a checkpoint that rounds are resumed from.
        trainer_state: progress of training (JSON).
        shard_bytes: maximum size of a weight file; larger weights are split into several.
        link_own_files: for `StoredWeights`, whether files in its own directory, which may be deleted later, are linked
            or copied instead of referred to.
        shards: SHA-256 by name of the files that the ranks of a learner have written into `partial_directory`, and
            which this completes.
        report: receives progress messages with the rate of hashing.

    Raises OSError if it cannot be written; nothing of it is left then.
    """
    partial = partial_directory(directory)
    if shards is None:
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
            link_own_files=link_own_files,
            shards=shards,
            report=report,
        )
    except BaseException as error:
        # Also after an interrupt. On a full disk the partial directory would block a retry.
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"{directory} cannot be written: {error}") from error
        raise
    _rename_into_place(partial, directory)


def partial_directory(directory: Path) -> Path:
    """Return where a checkpoint is written until it is complete."""
    return directory.with_name(f".{directory.name}.partial")


def _rename_into_place(partial: Path, directory: Path) -> None:
    """Rename a complete checkpoint to its place; delete an earlier one there only afterwards."""
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if directory.exists():
        directory.rename(earlier)
    partial.rename(directory)
    fsync(directory.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _write_partial(
    partial: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor] | StoredWeights | None,
    tokenizer_from: Path,
    *,
    adapter: Adapter | None,
    learner_state: Mapping[str, Tensor] | None,
    trainer_state: Mapping[str, Any] | None,
    shard_bytes: int,
    link_own_files: bool,
    shards: Mapping[str, str] | None,
    report: ReportProgress | None,
) -> None:
    assert weights is not None or adapter is not None or shards, "it has weights, or an adapter to something that has"
    if shards is None:
        partial.mkdir(parents=True)
    if isinstance(weights, StoredWeights):
        _write_config_and_tokenizer(partial, config, weights.dtype, tokenizer_from)
        _link_or_reference_files(partial, weights, report, link_own_files=link_own_files)
    else:
        write_policy(partial, config, weights, tokenizer_from, shard_bytes)
    if adapter is not None:
        write_adapter(partial, adapter)
    if learner_state is not None:
        save_file({name: tensor.contiguous() for name, tensor in learner_state.items()}, partial / LEARNER_STATE)
    if trainer_state is not None:
        _write_json(partial / TRAINER_STATE, trainer_state)
    written = dict(shards or {})
    found = checksums([path for path in sorted(partial.iterdir()) if path.name not in written])
    _write_json(partial / MANIFEST, {path.name: digest for path, digest in found.items()} | written)
    for path in (*found, partial / MANIFEST, partial):
        fsync(path)


def write_policy(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor] | None,
    tokenizer_from: Path,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write config, weights and tokenizer in the family's original format into an existing directory.

    The arguments are those of `save_checkpoint`. Raises OSError or SafetensorError.
    """
    # Adapters are in float32, and so is a policy that they are merged into.
    family, dtype = FAMILIES[config.family], torch.float32 if weights is None else weights["embed.weight"].dtype
    _write_config_and_tokenizer(directory, config, dtype, tokenizer_from)
    if weights is None:
        return
    assert {name: tensor.dtype for name, tensor in weights.items()} == parameter_dtypes(config, dtype)
    layout = family.layout({name: tensor.shape for name, tensor in weights.items()})
    # Meta tensors: views of one tensor of ours share storage, and would be counted once and kept in one shard.
    split = split_torch_state_dict_into_shards(layout.meta_tensors(weights), max_shard_size=shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        shard = {name: layout.stored(name, weights).contiguous() for name in names}
        save_file(shard, directory / filename, metadata={"format": "pt"})
    if split.is_sharded:
        _write_json(directory / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_config_and_tokenizer(
    directory: Path, config: TransformerConfig, dtype: torch.dtype, tokenizer_from: Path
) -> None:
    """Write the tokenizer and config files for weights of type `dtype`."""
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, directory / name)
    raw = FAMILIES[config.family].write_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(directory / CONFIG, raw)
    if config.other_stop_ids:
        _write_json(directory / GENERATION_CONFIG, {"eos_token_id": list(config.stop_ids)})


def _link_or_reference_files(
    directory: Path, weights: StoredWeights, report: ReportProgress | None, *, link_own_files: bool
) -> None:
    """Refer to the weight files of a checkpoint; with `link_own_files`, link or copy those in its own directory."""
    files = weight_files(weights.directory)
    own = [path for path in files if link_own_files and path.parent == weights.directory]
    for path in own:
        _link_or_copy(path.resolve(), directory / path.name)
    if others := [path for path in files if path not in own]:
        write_references(directory, others, report)
    if (weights.directory / INDEX).is_file():
        shutil.copyfile(weights.directory / INDEX, directory / INDEX)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # A different file system, or one without hard links.
        shutil.copyfile(source, target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
