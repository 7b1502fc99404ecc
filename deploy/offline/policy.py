"""Checkpoint loading: finds a checkpoint and prepares its sampler, tokenization and defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from actors.checkpoints.selection import find_position
from deploy.errors import UserError, os_errors, user_errors
from deploy.requests.base import is_valid_text
from deploy.requests.errors import TEMPLATE_ERRORS, template_error_text
from deploy.requests.families import AnyConfig, AnyDefaults, defaults_of, read_config
from deploy.requests.structured.grammars import Grammars
from deploy.requests.structured.structure import Structure
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
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar
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

    # Tokenization: the `Codec` of the planner. Special tokens in prompts are parsed as tokens.

    @cached_property
    def _grammars(self) -> Grammars | None:
        return None if self.tokenizer is None else Grammars(self.tokenizer, self.config.vocab_size)

    def encode_prompt(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokenize a text prompt. Raises FieldError if the text is invalid."""
        tokenizer = self._tokenizer_for("prompt_ids", *([text] if text else []))
        return tokenizer.encode_text(text, add_special_tokens=adds_special)

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        _param: str = "messages",
        *,
        template: Mapping[str, Any] | None = None,
        adds_special: bool = False,
    ) -> list[int]:
        """Tokenize a conversation; `template` has chat template variables. Raises FieldError if it is invalid."""
        texts = [text for message in messages for text in message.values()]
        tokenizer = self._tokenizer_for("prompt_ids", *texts)
        try:
            return tokenizer.encode_chat(messages, template=template, add_special_tokens=adds_special)
        except TEMPLATE_ERRORS as error:
            what = template_error_text(error)
            raise FieldError("{prompt_ids} does not fit the chat template: {what}", what=what) from error

    def encode_text(self, text: str, param: str) -> list[int]:
        """Tokenize a text without added special tokens. Raises FieldError if it is invalid."""
        return self._tokenizer_for(param, *([text] if text else [])).encode_plain(text)

    def check_ids(self, ids: Sequence[int], _param: str) -> list[int]:
        """Return the ids. They are validated with the request, by `check_any_request`."""
        return list(ids)

    def grammar(self, structure: Structure) -> Grammar:
        """Compile a structure to a grammar. Raises FieldError if it is not supported or there is no tokenizer."""
        if self._grammars is None:
            raise FieldError(
                "{grammar} says what the text is, and {name} has no tokenizer: leave it out", name=self.name
            )
        return self._grammars.of(structure)

    def _tokenizer_for(self, param: str, *texts: str) -> ChatTokenizer:
        """Return the tokenizer. Raises FieldError if there is none, or the texts are missing or invalid."""
        if self.tokenizer is None:
            raise FieldError(f"{{{param}}} is text, and {{name}} has no tokenizer; give prompt_ids", name=self.name)
        if not texts:
            raise FieldError(f"{{{param}}} is empty; a completion needs something to complete")
        if not all(map(is_valid_text, texts)):
            raise FieldError(f"{{{param}}} has half of a surrogate pair or bytes that are not UTF-8, which is no text")
        return self.tokenizer


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
