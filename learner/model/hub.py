"""Resolution of a checkpoint reference: a local directory, or a Hugging Face hub id, which is downloaded.

Only data is downloaded (config, safetensors, tokenizer files), never the Python files of a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

from learner.model.families.raw_config import CONFIG_FILES
from learner.model.tokenizer import TOKENIZER_FILES

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a peft adapter."""
_CONFIG_FILES = (*CONFIG_FILES, ADAPTER_CONFIG)
_TOKENIZER_FILES = (*TOKENIZER_FILES, ADAPTER_CONFIG)
_WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json", ADAPTER_WEIGHTS)
_ALL_FILES = (*_CONFIG_FILES, *_WEIGHT_FILES, *TOKENIZER_FILES)


def is_hub_id(reference: str | Path) -> bool:
    """Whether this is a hub id: it has the form of one, and there is no directory of that name."""
    return not Path(reference).is_dir() and _HUB_ID.fullmatch(str(reference)) is not None


def find_checkpoint(reference: str | Path, *, config_only: bool = False) -> Path:
    """Return the directory of a checkpoint, downloaded from the hub if it is not on this machine yet.

    Args:
        reference: a directory, or a hub id `org/name` or `org/name@revision`. A directory of that name takes
            precedence.
        config_only: whether to download only the files of the config, without weights.

    Raises:
        ValueError: there is no such directory and no such model, or it cannot be downloaded.
    """
    if Path(reference).is_dir():
        return Path(reference)
    match = _HUB_ID.fullmatch(str(reference))
    if match is None:
        raise ValueError(f"{reference} is no directory, and no hub id either: that is org/name or org/name@revision")
    return _fetch(match["repo"], match["revision"], _CONFIG_FILES if config_only else _ALL_FILES)


def find_tokenizer(reference: str | Path) -> Path:
    """Find a checkpoint as `find_checkpoint` does, but download only the tokenizer's files and an adapter's config."""
    match = None if Path(reference).is_dir() else _HUB_ID.fullmatch(str(reference))
    if match is None:
        return find_checkpoint(reference)
    return _fetch(match["repo"], match["revision"], _TOKENIZER_FILES)


def _fetch(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except errors.HFValidationError as error:
        raise ValueError(f"{repo} is no directory, and no hub id either: {_first_line(error)}") from error
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no directory {repo}, and the hub shows no model of that name; check the name, and if it is "
            "private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{repo} has no revision {revision} on the hub; name one of its branches, tags or commits, or leave it out"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(_not_cached_message(repo, error)) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # the HTTP client's, by its public place
        raise ValueError(
            f"{repo} cannot be fetched from the hub: {_first_line(error)}; try again, or give a directory"
        ) from error


def _not_cached_message(repo: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    extent = "only in part" if isinstance(error, errors.IncompleteSnapshotError) else "not"
    where = f"there is no directory {repo}, and the model {repo} is {extent} in the cache {constants.HF_HUB_CACHE}"
    if constants.is_offline_mode():
        return f"{where}, and HF_HUB_OFFLINE is set; unset it, or give a directory"
    return f"{where}, and the hub at {constants.ENDPOINT} cannot be reached; check the network, or give a directory"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
