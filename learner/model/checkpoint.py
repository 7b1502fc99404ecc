"""Checkpoints: Hugging Face directories, written whole or not at all.

A directory holds `config.json`, `model.safetensors` and the tokenizer's files, so that the original LLaDA code loads
it too. d1 adds `manifest.json` (a checksum of every file) and `trainer_state.json`; a checkpoint of the rounds also has
`learner.safetensors`. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.model import llada
from learner.model.transformer import Transformer, TransformerConfig

MANIFEST = "manifest.json"
LEARNER_STATE = "learner.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_policy(directory: Path) -> Transformer:
    """The policy of a checkpoint directory, in float32 on the CPU.

    Raises:
        ValueError: no checkpoint there, another model family, or a tensor missing, extra or of a wrong shape.
    """
    config = load_config(directory)
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(load_weights(directory, model), assign=True)
    return model


def load_config(directory: Path) -> TransformerConfig:
    """The policy's config of a checkpoint directory. Raises ValueError as `load_policy` does."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a checkpoint: it has no config.json")
    raw = json.loads(path.read_text())
    if raw.get("model_type") != llada.MODEL_TYPE:
        raise ValueError(f"{path} has model_type {raw.get('model_type')!r}; d1 reads 'llada'")
    return llada.read_config(raw)


def load_weights(directory: Path, model: Transformer) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names, checked against `model`'s shapes. Raises ValueError."""
    path = directory / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{directory} is not a checkpoint: it has no model.safetensors")
    stored = load_file(path)
    weights = {}
    for name, parameter in model.named_parameters():
        stored_name = llada.checkpoint_name(name)
        if stored_name not in stored:
            raise ValueError(f"{path} has no tensor {stored_name}")
        tensor = stored.pop(stored_name)
        if tensor.shape != parameter.shape:
            shapes = f"is {list(tensor.shape)}; config.json makes {list(parameter.shape)}"
            raise ValueError(f"{path}: {stored_name} {shapes}")
        weights[name] = tensor.to(torch.float32)
    if stored:
        raise ValueError(f"{path} has a tensor that the model does not: {sorted(stored)[0]}")
    return weights


def save_checkpoint(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    tokenizer_from: Path,
    *,
    learner_state: Mapping[str, Tensor] | None = None,
    trainer_state: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint so that `directory` is complete or absent, even if the machine dies in the middle.

    Args:
        directory: where it will be; an earlier checkpoint of that name is replaced.
        config: the policy's shape.
        weights: the whole (not sharded) parameters under our names.
        tokenizer_from: a directory whose tokenizer files are copied.
        learner_state: the learner's other tensors by name, for a checkpoint that the rounds resume from.
        trainer_state: where training stood (JSON).
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    named = {llada.checkpoint_name(name): tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, partial / "model.safetensors", metadata={"format": "pt"})
    _write_json(partial / "config.json", llada.write_config(config))
    if learner_state is not None:
        save_file({name: tensor.contiguous() for name, tensor in learner_state.items()}, partial / LEARNER_STATE)
    if trainer_state is not None:
        _write_json(partial / "trainer_state.json", trainer_state)
    for name in _TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, partial / name)
    _write_json(partial / MANIFEST, {path.name: _checksum(path) for path in sorted(partial.iterdir())})
    for path in partial.iterdir():
        _fsync(path)
    _fsync(partial)
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)
    _fsync(directory.parent)


def verify_checkpoint(directory: Path) -> None:
    """Check a checkpoint's files against its manifest. Raises ValueError that names the file which differs."""
    manifest_path = directory / MANIFEST
    if not manifest_path.is_file():
        raise ValueError(f"{directory} is not a checkpoint that d1 wrote: it has no {MANIFEST}")
    for name, checksum in json.loads(manifest_path.read_text()).items():
        path = directory / name
        if not path.is_file() or _checksum(path) != checksum:
            raise ValueError(f"{path} is damaged: it is not what {MANIFEST} lists")


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
