"""Checkpoints: Hugging Face directories, written whole or not at all.

A directory holds `config.json`, the weights and the tokenizer's files, so that the family's original code loads it too.
The weights are `model.safetensors`, or several shards with `model.safetensors.index.json`. d1 adds `manifest.json` (a
checksum of every file) and `trainer_state.json`; a checkpoint of the rounds also has `learner.safetensors`. One of a
LoRA run has `lora.safetensors` instead of weights: its policy is that of the checkpoint that the adapter stands on, a
directory beside it, with the adapter. One with `weights.json` refers to weight files elsewhere. Nothing is pickled, and
no code that comes with a checkpoint is run.
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

from learner.model.adapter import Adapter, check_under_peft, put_beside, read_chain, write_adapter
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
from learner.model.networks import held_dtypes, make_on_meta
from learner.model.quantized import linear_layers, set_rounded
from learner.model.storage.hashing import checksums
from learner.model.storage.references import write_references
from learner.model.storage.throughput import Say
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import TOKENIZER_FILES
from learner.model.transformer import Transformer

_SHARD_BYTES = 5_000_000_000


def load_policy(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    say: Say | None = None,
) -> Transformer:
    """The policy of a checkpoint directory; its adapters stay beside its weights.

    Files are read straight into it: beside the policy itself there are small buffers in memory.

    Args:
        directory: where the checkpoint is.
        dtype: what the weights are cast to as they are read; a router's bias stays in float32.
        device: where they are held.
        say: is told at which rate they are read.

    Raises:
        ValueError: no checkpoint there, another model family, or a tensor missing, extra or of a wrong shape.
    """
    chain = read_chain(directory)
    base_weights = "full" if chain.adapter is None else chain.adapter.base_weights
    model = load_weights(chain.weights, dtype, device, say, base_weights=base_weights)
    if chain.adapter is not None:
        # As stored: rounded weights say less.
        check_under_peft(directory, StoredWeights(chain.weights))
        try:
            put_beside(model, chain.adapter.matrices, chain.adapter.scaling, chain.start)
        except ValueError as error:
            raise ValueError(f"the adapter in {directory} cannot be used: {error}") from error
    return model


def load_weights(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    say: Say | None = None,
    *,
    base_weights: BaseWeights = "full",
) -> Transformer:
    """The policy of a checkpoint directory that has weights itself, rounded to 4 bits where `base_weights` is `nf4`.

    The other arguments and the errors are `load_policy`'s.
    """
    weights = StoredWeights(directory)
    model, held = make_on_meta(weights.config), held_dtypes(weights.config, dtype)
    whole = {
        name: torch.empty(tuple(stored.shape), dtype=held[name], device=device) for name, stored in weights.items()
    }
    weights.read_into(whole, say=say)
    model.load_state_dict(whole, assign=True)
    if base_weights == "nf4":
        round_weights(model, directory, say)
    return model


def round_weights(model: Transformer, directory: Path, say: Say | None = None) -> None:
    """Round the linear layers of the blocks to 4 bits, in place, from the weights of the checkpoint that it was loaded
    from: those of a learner with `base_weights: nf4`. Raises ValueError where bitsandbytes is missing."""
    layers = linear_layers(model)
    for name, weight in StoredWeights(directory).whole_ones([f"{name}.weight" for name in layers], say):
        set_rounded(layers[name.removesuffix(".weight")], weight)


def load_merged(directory: Path, say: Say | None = None) -> Transformer:
    """The policy of a checkpoint directory with its adapters merged into its weights, in float32, on the CPU: for those
    who have the original code alone. Raises as `load_policy`."""
    model = load_policy(directory, say=say)
    merge_adapters(model)
    return model


def empty_policy(directory: Path, dtype: torch.dtype, device: str | torch.device) -> Transformer:
    """A policy of a checkpoint's shape whose weights are anything yet. Raises ValueError where its config is none."""
    return make_on_meta(load_config(directory)).to(dtype).to_empty(device=device)


def stored_dtype(directory: Path) -> torch.dtype:
    """What holds the weights of a checkpoint as they are: bfloat16 where all of them are in it, else float32.

    A router's bias, which every policy holds in float32, does not count. What adapters make of weights is in float32.
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
    takes_files: bool = False,
    say: Say | None = None,
) -> None:
    """Write a checkpoint so that `directory` is complete or absent, even if the machine dies in the middle.

    Args:
        directory: where it will be; an earlier checkpoint of that name is replaced.
        config: the policy's shape and family.
        weights: the whole (not sharded) parameters under our names, all of one type but for routers' biases, which
            are in float32. Of a checkpoint: its files are hashed, and referred to where they are. None: the policy is
            what the adapter stands on, with the adapter.
        tokenizer_from: a directory whose tokenizer files are copied.
        adapter: that of the stage, in a LoRA run.
        learner_state: the learner's other tensors by name, for a checkpoint that the rounds resume from.
        trainer_state: where training stood (JSON).
        shard_bytes: weights that take more than this are written as several files of at most this size.
        takes_files: whether the weight files of a checkpoint's own directory, which may go, are linked or copied
            instead of referred to.
        say: is told at which rate files are hashed that are referred to.

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
            takes_files=takes_files,
            say=say,
        )
    except (OSError, SafetensorError) as error:
        # On a full disk it would be in its own way.
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{directory} cannot be written: {error}") from error
    except BaseException:
        # Somebody stopped it, who may not come back.
        shutil.rmtree(partial, ignore_errors=True)
        raise
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
    weights: Mapping[str, Tensor] | StoredWeights | None,
    tokenizer_from: Path,
    *,
    adapter: Adapter | None,
    learner_state: Mapping[str, Tensor] | None,
    trainer_state: Mapping[str, Any] | None,
    shard_bytes: int,
    takes_files: bool,
    say: Say | None,
) -> None:
    assert weights is not None or adapter is not None, "it has weights, or an adapter to something that has"
    partial.mkdir(parents=True)
    if isinstance(weights, StoredWeights):
        _write_around(partial, config, weights.dtype, tokenizer_from)
        _put_files(partial, weights, say, takes_files=takes_files)
    else:
        write_policy(partial, config, weights, tokenizer_from, shard_bytes)
    if adapter is not None:
        write_adapter(partial, adapter)
    if learner_state is not None:
        save_file({name: tensor.contiguous() for name, tensor in learner_state.items()}, partial / LEARNER_STATE)
    if trainer_state is not None:
        _write_json(partial / TRAINER_STATE, trainer_state)
    found = checksums(sorted(partial.iterdir()))
    _write_json(partial / MANIFEST, {path.name: digest for path, digest in found.items()})
    for path in partial.iterdir():
        _fsync(path)
    _fsync(partial)


def write_policy(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor] | None,
    tokenizer_from: Path,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write what the family's original code reads into a directory that exists: config, weights under its own names and
    tokenizer; the arguments are `save_checkpoint`'s. Raises OSError or SafetensorError."""
    # An adapter's precision is float32, and that of what it is merged into.
    family, dtype = FAMILIES[config.family], torch.float32 if weights is None else weights["embed.weight"].dtype
    _write_around(directory, config, dtype, tokenizer_from)
    if weights is None:
        return
    assert {name: tensor.dtype for name, tensor in weights.items()} == held_dtypes(config, dtype)
    layout = family.layout({name: tensor.shape for name, tensor in weights.items()})
    # By outlines: views of one tensor of ours would be counted once, and kept together.
    split = split_torch_state_dict_into_shards(layout.outline(weights), max_shard_size=shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        shard = {name: layout.stored(name, weights).contiguous() for name in names}
        save_file(shard, directory / filename, metadata={"format": "pt"})
    if split.is_sharded:
        _write_json(directory / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_around(directory: Path, config: TransformerConfig, dtype: torch.dtype, tokenizer_from: Path) -> None:
    """Write what the original code reads beside weights that are held in `dtype`."""
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, directory / name)
    raw = FAMILIES[config.family].write_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(directory / CONFIG, raw)
    if config.other_stop_ids:
        _write_json(directory / GENERATION_CONFIG, {"eos_token_id": list(config.stop_ids)})


def _put_files(directory: Path, weights: StoredWeights, say: Say | None, *, takes_files: bool) -> None:
    """Refer to the files of another checkpoint; or link or copy those that lie in its own directory."""
    files = weight_files(weights.directory)
    taken = [path for path in files if takes_files and path.parent == weights.directory]
    for path in taken:
        _link_or_copy(path.resolve(), directory / path.name)
    if others := [path for path in files if path not in taken]:
        write_references(directory, others, say)
    if (weights.directory / INDEX).is_file():
        shutil.copyfile(weights.directory / INDEX, directory / INDEX)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(source, target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
