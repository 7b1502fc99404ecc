"""`d1 export`: a checkpoint without what only d1 reads, or the adapter that it was trained as."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from deploy.errors import UserError, reason
from deploy.runs.references import find_checkpoint_of
from deploy.sampling.policy import read_tokenizer
from learner.model.adapter import Adapter, check_under_peft, read_chain, write_peft_adapter
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

    Its weights are the checkpoint's, to the bit; adapters are merged into them, in float32.

    Args:
        reference: a checkpoint or a run (its newest checkpoint), named as for `deploy.runs.references.find`.
        out: where to; nothing may be there but an empty directory.
        runs_dir: where the runs are.

    Returns:
        The directory of the checkpoint that was taken.

    Raises:
        UserError: there is no checkpoint, it is damaged, or `out` cannot be written.
    """
    directory = _find(reference, runs_dir)
    try:
        _write(out, lambda partial: _write_policy_of(directory, partial))
    except ValueError as error:
        raise UserError(str(error)) from error
    return directory


def export_adapter(
    reference: str, out: Path, runs_dir: Path = Path("runs"), *, is_half: bool = False
) -> tuple[Path, Path]:
    """Write the adapter alone, as a directory that peft loads onto the original code's model.

    It is what all stages of the run have added to the policy that the run began with.

    Args:
        reference: as of `export_policy`.
        out: likewise.
        runs_dir: likewise.
        is_half: round its matrices to bfloat16.

    Returns:
        The directories of the checkpoint that was taken and of the policy that the adapter stands on.

    Raises:
        UserError: as of `export_policy`, and for a checkpoint that was trained whole, or an adapter that peft cannot
            have.
    """
    directory = _find(reference, runs_dir)
    try:
        adapter, base = _whole_adapter(directory)
        family = load_config(directory).family
        dtype = torch.bfloat16 if is_half else torch.float32
        matrices = {name: matrix.to(dtype) for name, matrix in adapter.matrices.items()}
        adapter = replace(adapter, matrices=matrices)
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        # Where its weights are: peft loads the original model from there.
        original = weight_files(base)[0].parent.resolve()
        _write(out, lambda partial: write_peft_adapter(partial, adapter, family, str(original)))
    except ValueError as error:
        raise UserError(str(error)) from error
    return directory, base


def _find(reference: str, runs_dir: Path) -> Path:
    try:
        directory = find_checkpoint_of(reference, runs_dir)
        load_config(directory)
        if (directory / MANIFEST).is_file():
            verify_checkpoint(directory)
        StoredWeights(checkpoint_chain(directory)[-1])
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {reference}: {reason(error)}") from error
    return directory


def _write_policy_of(directory: Path, out: Path) -> None:
    """Copy a checkpoint's own files, or write weights that compute what it computes.

    An adapter is merged. Weights that have other names than the original code's are written under its names.
    """
    is_adapted = has_adapter(directory)
    stored = None if is_adapted else StoredWeights(directory)
    if stored is not None and not stored.is_renamed:
        for path in policy_files(directory):
            shutil.copyfile(path, out / path.name)
        return
    read_tokenizer(directory)
    policy = load_merged(directory) if stored is None else load_policy(directory, stored.dtype)
    write_policy(out, policy.config, policy.state_dict(), tokenizer_directory(directory))


def _whole_adapter(directory: Path) -> tuple[Adapter, Path]:
    """What the stages of a run have added up to a checkpoint, and the checkpoint that had no adapter yet.

    Each stage trains an adapter of its own, on the policy that the one before it ended with. Raises ValueError.
    """
    for adapted in checkpoint_chain(directory)[:-1]:
        if (adapted / MANIFEST).is_file():
            verify_checkpoint(adapted, [ADAPTER])
    chain = read_chain(directory)
    check_under_peft(directory, StoredWeights(chain.weights))
    if (adapter := chain.together) is None:
        raise ValueError(f"{directory} was trained whole: it has no {ADAPTER}; leave out --lora apart")
    return adapter, chain.weights


def _write(out: Path, write: Callable[[Path], object]) -> None:
    """Have a directory written beside its place, and put there. Raises UserError when it cannot be."""
    out = out.absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty directory; export to another place")
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {reason(error)}") from error
    except SafetensorError as error:
        raise UserError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
