"""Checkpoint loading: finds a checkpoint and prepares its sampler, tokenization and defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from actors.checkpoints.selection import find_position
from deploy.errors import UserError, os_errors, user_errors
from deploy.requests.codec import Codec
from deploy.requests.families import AnyConfig, AnyDefaults, defaults_of, read_config
from deploy.runs.checkpoints import read_recipe
from deploy.runs.references import find_checkpoint_of, run_of
from learner.hardware import indexed_device, threads_for
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import open_tokenizer, tokenizer_directory
from learner.model.renoising.config import is_renoising
from learner.model.renoising.policy import load_renoising_policy
from learner.model.storage.throughput import ReportProgress
from learner.model.tokenizer import TOKENIZER_FILES, ChatTokenizer
from rollout.config import EngineConfig
from rollout.renoising.sampler import AnySampler, RenoisingSampler
from rollout.sampler import Sampler

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class ReadyPolicy:
    """Checkpoint, ready to plan requests and to sample them."""

    name: str
    """Name as given by the user."""
    directory: Path
    """Its directory."""
    device: Device
    """Device of the sampler."""
    engine: EngineConfig
    """Settings of the sampling engine."""
    config: AnyConfig
    """Model config."""
    tokenizer: ChatTokenizer | None
    """None if the checkpoint has none. Prompts are token ids then."""
    defaults: AnyDefaults
    """Default sampling parameters."""

    @cached_property
    def sampler(self) -> AnySampler:
        """Sampler on the device, loaded by the first use. Raises UserError if the weights cannot be read."""
        return self.load()

    def load(self, say: ReportProgress | None = None) -> AnySampler:
        """Load the sampler; `say` receives progress messages. Raises UserError if the weights cannot be read."""
        with user_errors(ValueError), os_errors(f"cannot read the checkpoint {self.name}"):
            sampler = load_sampler(self.directory, self.device, self.engine, say)
        if isinstance(sampler, Sampler) and self.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_for(sampler.model, torch.get_num_threads()))
        # As the cached property does.
        self.__dict__["sampler"] = sampler
        return sampler

    @cached_property
    def codec(self) -> Codec:
        """Tokenization of requests."""
        return Codec(self.name, self.config, self.tokenizer)


def open_policy(
    reference: str,
    device: Device | None,
    engine: EngineConfig,
    runs_dir: Path = Path("runs"),
    say: ReportProgress | None = None,
) -> ReadyPolicy:
    """Find a checkpoint, or the newest of a run, and read all of it but the weights.

    `reference` is as for `deploy.runs.references.find`. `say` receives progress messages: a run's checkpoint is read to
    verify it. Raises UserError if there is no checkpoint, it cannot be read, or the device does not exist.
    """
    device = choose_device(device)
    with user_errors(ValueError), os_errors(f"cannot read the checkpoint {reference}"):
        directory = find_checkpoint_of(reference, runs_dir, say)
        config = read_config(directory)
        run_dir = run_of(directory)
        evaluated = None if run_dir is None else read_recipe(run_dir).evaluated_params[0]
        defaults = defaults_of(directory, config, evaluated)
    return ReadyPolicy(
        name=reference,
        directory=directory,
        device=device,
        engine=engine,
        config=config,
        tokenizer=read_tokenizer(directory),
        defaults=defaults,
    )


def load_sampler(directory: Path, device: str, engine: EngineConfig, say: ReportProgress | None = None) -> AnySampler:
    """Load the sampler of a checkpoint of either family. Raises ValueError or OSError if it cannot be read."""
    place, position = indexed_device(device), find_position(directory)
    version = 0 if position is None else position.policy_version
    if is_renoising(directory):
        return RenoisingSampler(load_renoising_policy(directory, engine.torch_dtype).to(place), version)
    return Sampler(load_policy(directory, engine.torch_dtype, place, say), version, engine)


def choose_device(wanted: Device | None) -> Device:
    """Return the device; None selects a GPU if there is one. Raises UserError if the wanted GPU does not exist."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise UserError("--device cuda: torch sees no GPU on this machine; take --device cpu")
    return wanted or ("cuda" if has_gpu else "cpu")


def read_tokenizer(directory: Path) -> ChatTokenizer | None:
    """Load the tokenizer of a checkpoint; None if it has none. Raises UserError if it cannot be read."""
    with user_errors(ValueError), os_errors(f"cannot read the checkpoint {directory}"):
        source = tokenizer_directory(directory)
    if not any((source / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return open_tokenizer(directory)
    except (
        Exception
    ) as error:  # the tokenizers library raises whatever a damaged file leads it to, plain Exceptions too
        what = str(error).partition("\n")[0]
        raise UserError(f"the tokenizer in {source} cannot be read ({type(error).__name__}: {what})") from error
