"""`d1 export`: a checkpoint as a Hugging Face directory, or its LoRA adapter for peft."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from deploy.errors import UserError, os_errors, reason, user_errors
from deploy.offline.policy import read_tokenizer
from deploy.runs.references import find_checkpoint_of
from learner.model.adapter import Adapter, check_peft_copies, read_chain, write_peft_adapter
from learner.model.checkpoint import load_merged, load_policy, write_policy
from learner.model.checkpoint_files import (
    ADAPTER,
    MANIFEST,
    checkpoint_chain,
    has_adapter,
    load_config,
    policy_files,
    tokenizer_directory,
    verify_checkpoint,
    weight_files,
)
from learner.model.storage.weights import StoredWeights


def export_policy(reference: str, out: Path, runs_dir: Path = Path("runs")) -> Path:
    """Write a Hugging Face directory that the original code of the policy's family loads.

    Its weights are bit-identical to the checkpoint's; adapters are merged into them in float32. Of a run, it is the
    newest checkpoint. `out` must not exist, or be an empty directory. Returns the directory of the checkpoint.

    Raises UserError if there is no checkpoint, it is damaged, or `out` cannot be written.
    """
    with user_errors(ValueError), os_errors(f"cannot read the checkpoint {reference}"):
        directory = _find(reference, runs_dir)
        _write(out, lambda partial: _write_policy_of(directory, partial))
    return directory


def export_adapter(
    reference: str, out: Path, runs_dir: Path = Path("runs"), *, is_half: bool = False
) -> tuple[Path, Path]:
    """Write the adapter alone, as a directory that peft loads onto the original code's model.

    It combines what all stages of the run have added to the initial policy. `is_half` rounds its matrices to bfloat16.
    Returns the directories of the exported checkpoint and of the policy below the adapter.

    Raises UserError as `export_policy`, and for a checkpoint without adapter, or one that peft cannot represent.
    """
    with user_errors(ValueError), os_errors(f"cannot read the checkpoint {reference}"):
        directory = _find(reference, runs_dir)
        adapter, base = _whole_adapter(directory)
        family = load_config(directory).family
        dtype = torch.bfloat16 if is_half else torch.float32
        matrices = {name: matrix.to(dtype) for name, matrix in adapter.matrices.items()}
        # The directory of its weights, from which peft loads the original model.
        original = str(weight_files(base)[0].parent.resolve())
        adapter = replace(adapter, matrices=matrices)
        _write(out, lambda partial: write_peft_adapter(partial, adapter, family, original))
    return directory, base


def _find(reference: str, runs_dir: Path) -> Path:
    directory = find_checkpoint_of(reference, runs_dir)
    load_config(directory)
    if (directory / MANIFEST).is_file():
        verify_checkpoint(directory)
    StoredWeights(checkpoint_chain(directory)[-1])
    return directory


def _write_policy_of(directory: Path, out: Path) -> None:
    """Copy a checkpoint's own files, or write equivalent weights.

    An adapter is merged. Weights whose names differ from the original code's are written under its names.
    """
    is_adapted = has_adapter(directory)
    stored = None if is_adapted else StoredWeights(directory)
    if stored is not None and not stored.has_foreign_names:
        for path in policy_files(directory):
            shutil.copyfile(path, out / path.name)
        return
    read_tokenizer(directory)
    policy = load_merged(directory) if stored is None else load_policy(directory, stored.dtype)
    write_policy(out, policy.config, policy.state_dict(), tokenizer_directory(directory))


def _whole_adapter(directory: Path) -> tuple[Adapter, Path]:
    """Combine the adapters of all stages up to a checkpoint; also return the checkpoint below them, without adapter.

    Each stage trains its own adapter, on the final policy of the stage before. Raises ValueError if there is none, or
    if one is damaged.
    """
    for adapted in checkpoint_chain(directory)[:-1]:
        if (adapted / MANIFEST).is_file():
            verify_checkpoint(adapted, [ADAPTER])
    chain = read_chain(directory)
    check_peft_copies(directory, StoredWeights(chain.weights))
    if (adapter := chain.combined) is None:
        raise ValueError(f"{directory} was trained whole: it has no {ADAPTER}; leave out --lora apart")
    return adapter, chain.weights


def _write(out: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a directory, and move it to `out` atomically. Raises UserError if that fails."""
    out = out.absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty directory; export to another place")
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        what = reason(error) if isinstance(error, OSError) else error
        raise UserError(f"cannot write {out}: {what}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
