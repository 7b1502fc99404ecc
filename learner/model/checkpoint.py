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
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner.model.adapter import Adapter, check_under_peft, put_beside, read_chain, write_adapter
from learner.model.attention.rotary import rope_frequencies
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
from learner.model.families.layout import Piece, rows_of, within
from learner.model.families.raw_config import CONFIG, GENERATION_CONFIG
from learner.model.families.stored_names import is_rotary_buffer, plain_names
from learner.model.lora import merge_adapters
from learner.model.lora_config import BaseWeights
from learner.model.networks import held_dtypes, make_on_meta
from learner.model.quantized import linear_layers, set_rounded
from learner.model.storage.hashing import checksums
from learner.model.storage.reading import Extent, read_extents
from learner.model.storage.references import write_references
from learner.model.storage.throughput import Say, Throughput
from learner.model.tokenizer import TOKENIZER_FILES
from learner.model.transformer import Transformer

# As safetensors names them. Quantised weights mean nothing without their scales.
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_SHARD_BYTES = 5_000_000_000
# A safetensors file begins with the length of its header.
_LENGTH_BYTES = 8
# A wrong config.json makes every tensor wrong: so many are named, the others counted.
_MOST_NAMED = 3
# Numbers of a tensor that are compared at a time.
_COMPARED = 2**24


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


class StoredWeights(Mapping[str, "StoredTensor"]):
    """The weights of a checkpoint directory by our names; what is read of them is read when it is asked for."""

    def __init__(self, directory: Path, config: TransformerConfig | None = None) -> None:
        """Look at the headers, which are small.

        `config` takes the place of the directory's, where that is another model's with the same tensors.
        Raises ValueError if there are no weights, or a tensor is not as the config makes it.
        """
        self.directory = directory
        """Where it is."""
        self.config = config or load_config(directory)
        """The policy's shape and family."""
        parameters = dict(make_on_meta(self.config).to(torch.bfloat16).named_parameters())
        family = FAMILIES[self.config.family]
        layout = family.layout({name: held.shape for name, held in parameters.items()})
        found = _read_headers(weight_files(directory))
        stored, self.is_renamed = self._in_our_names(found)
        """Whether its tensors have other names than the family's original code gives them."""
        surplus = {name for name in stored.keys() - layout.stored_shapes.keys() if self._is_known_surplus(name)}
        shapes = {name: header.shape for name, header in stored.items() if name not in surplus}
        _check_shapes(directory, shapes, layout.stored_shapes)
        self._check_surplus({name: stored[name] for name in surplus}, stored[family.outer_names["embed.weight"]])
        self._tensors = {
            name: StoredTensor(held.shape, layout.of_ours[name], stored) for name, held in parameters.items()
        }
        pieces = [layout.of_ours[name] for name, held in parameters.items() if held.dtype is torch.bfloat16]
        kinds = {stored[piece.stored].dtype for of_one in pieces for piece in of_one}
        self.dtype = torch.bfloat16 if kinds == {torch.bfloat16} else torch.float32
        """What holds them as they are: bfloat16 where all are in it that it may hold, else float32."""

    def _in_our_names(self, found: Mapping[str, StoredHeader]) -> tuple[dict[str, StoredHeader], bool]:
        """The tensors by the family's names, and whether they were stored under others."""
        names = FAMILIES[self.config.family].outer_names
        plain = plain_names(found, names["norm.weight"])
        if self.config.tied_embeddings and names["embed.weight"] not in plain.values():
            # The one matrix may be stored under either name.
            plain = {
                name: names["embed.weight"] if ours == names["head.weight"] else ours for name, ours in plain.items()
            }
        stored: dict[str, StoredHeader] = {}
        for name, ours in plain.items():
            if ours in stored and not _are_equal(found[name], stored[ours]):
                raise ValueError(
                    f"{ours} is in {stored[ours].path} and, as {name}, in {found[name].path}; one of them is of "
                    "another checkpoint"
                )
            stored[ours] = found[name]
        return stored, any(name != ours for name, ours in plain.items())

    def _is_known_surplus(self, name: str) -> bool:
        is_head = name == FAMILIES[self.config.family].outer_names["head.weight"]
        return is_rotary_buffer(name) or (is_head and self.config.tied_embeddings)

    def _check_surplus(self, surplus: Mapping[str, StoredHeader], embedding: StoredHeader) -> None:
        """Raise ValueError where a tensor that is stored beside ours is not what ours make of it."""
        for name, header in surplus.items():
            if is_rotary_buffer(name):
                if not _are_frequencies(header, rope_frequencies(self.config, torch.device("cpu"))):
                    raise ValueError(
                        f"{name} in {header.path} holds other rotary frequencies than those that config.json makes; "
                        "correct its rotary settings, or remove the tensor"
                    )
            elif not _are_equal(header, embedding):
                raise ValueError(
                    f"{name} in {header.path} is not {FAMILIES[self.config.family].outer_names['embed.weight']}, and "
                    "config.json says that they are one tensor; untie them there, or remove the one that is wrong"
                )

    def read_into(
        self, destinations: Mapping[str, Tensor], rows: Mapping[str, slice] | None = None, say: Say | None = None
    ) -> None:
        """Read tensors to where they belong, in their precision and on their device, in several threads.

        Args:
            destinations: by our names; each in one piece.
            rows: which rows of a tensor its destination holds; all, where it is not listed.
            say: is told at which rate they are read.

        Raises ValueError where a file has become shorter, OSError where it cannot be read.
        """
        extents = [
            extent
            for name, destination in destinations.items()
            for extent in self._tensors[name].extents((rows or {}).get(name, slice(None)), destination.detach())
        ]
        num_bytes = sum(extent.num_bytes for extent in extents)
        read_extents(extents, Throughput(f"loading {self.directory.name}", num_bytes, say))

    def whole_ones(self, names: Iterable[str], say: Say | None = None) -> Iterator[tuple[str, Tensor]]:
        """Tensors by our names, whole, in float32 on the CPU: read one after the other, and not kept here.

        `say` is told at which rate they are read. Raises as `read_into` does.
        """
        everything, tensors = slice(None), {name: self._tensors[name] for name in names}
        on_meta = (tensor.extents(everything, torch.empty(*tensor.shape, device="meta")) for tensor in tensors.values())
        num_bytes = sum(extent.num_bytes for extents in on_meta for extent in extents)
        progress = Throughput(f"loading {self.directory.name}", num_bytes, say)
        for name, tensor in tensors.items():
            whole = torch.empty(*tensor.shape)
            read_extents(list(tensor.extents(everything, whole)), progress)
            yield name, whole

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHeader:
    """Where one of a checkpoint's tensors is."""

    path: Path
    """Its file."""
    begin: int
    """Its first byte there."""
    dtype: torch.dtype
    """What its numbers are."""
    shape: list[int]
    """Of the checkpoint's tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of our tensors in files, of which any rows can be read."""

    shape: Sequence[int]
    """Ours."""
    pieces: Sequence[Piece]
    """What of the checkpoint's tensors it is made of."""
    stored: Mapping[str, StoredHeader]
    """The checkpoint's tensors by name."""

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows, on the CPU."""
        begin, end, _ = rows.indices(self.shape[0])
        kinds = (self.stored[piece.stored].dtype for piece in self.pieces)
        found = torch.empty(end - begin, *self.shape[1:], dtype=reduce(torch.promote_types, kinds))
        read_extents(list(self.extents(rows, found)))
        return found

    def extents(self, rows: slice, destination: Tensor) -> Iterator[Extent]:
        """Where some rows are in the files, for a destination of their shape."""
        begin, end, _ = rows.indices(self.shape[0])
        inner, width = rows_of(self.shape) // self.shape[0], self.shape[-1] if len(self.shape) > 1 else 1
        numbers, first = destination.view(-1), 0
        assert len(numbers) == (end - begin) * inner * width, "a destination has the shape of its rows"
        for name, part in within(self.pieces, begin * inner, end * inner):
            held, after = self.stored[name], first + (part.stop - part.start) * width
            yield Extent(
                path=held.path,
                begin=held.begin + part.start * width * held.dtype.itemsize,
                dtype=held.dtype,
                destination=numbers[first:after],
            )
            first = after


def _whole(header: StoredHeader) -> StoredTensor:
    """A tensor of a checkpoint as it stands there."""
    piece = Piece(ours="", our_begin=0, stored="", stored_begin=0, num_rows=rows_of(header.shape))
    return StoredTensor(header.shape, [piece], {"": header})


def _are_equal(one: StoredHeader, other: StoredHeader) -> bool:
    """Whether two tensors hold the same numbers; one without an axis or numbers equals none."""
    if one.shape != other.shape or not math.prod(one.shape or [0]):
        return False
    step = max(1, _COMPARED * one.shape[0] // math.prod(one.shape))
    parts, wider = range(0, one.shape[0], step), torch.promote_types(one.dtype, other.dtype)
    pairs = (tuple(_whole(each)[slice(begin, begin + step)].to(wider) for each in (one, other)) for begin in parts)
    return all(torch.equal(*pair) for pair in pairs)


def _are_frequencies(header: StoredHeader, expected: Tensor) -> bool:
    """Whether a tensor holds these frequencies, as far as its precision goes."""
    if header.shape != list(expected.shape):
        return False
    # Half precision has 8 bits or more, and steps of 6e-8 near 0.
    relative, absolute = (2**-8, 6e-8) if header.dtype.itemsize == 2 else (1e-4, 0.0)
    return torch.allclose(_whole(header)[slice(None)].float(), expected, rtol=relative, atol=absolute)


def stored_dtype(directory: Path) -> torch.dtype:
    """What holds the weights of a checkpoint as they are: bfloat16 where all of them are in it, else float32.

    A router's bias, which every policy holds in float32, does not count. What adapters make of weights is in float32.
    Raises ValueError as `load_policy` does.
    """
    *adapted, weights = checkpoint_chain(directory)
    return torch.float32 if adapted else StoredWeights(weights).dtype


def _read_headers(paths: Iterable[Path]) -> dict[str, StoredHeader]:
    """The tensors of several files by name. Raises ValueError where two files have different ones of one name."""
    found: dict[str, StoredHeader] = {}
    for path in paths:
        for name, header in _read_header(path).items():
            if name in found and not _are_equal(header, found[name]):
                raise ValueError(f"{name} is in {found[name].path} and in {path}; one of them is of another checkpoint")
            found[name] = header
    return found


def _read_header(path: Path) -> dict[str, StoredHeader]:
    """The tensors of a file by name. Raises ValueError for what is no whole safetensors file."""
    try:
        # It checks that the header is one, and that the file is as long as that says.
        with safe_open(path, framework="pt"), path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = {name: about for name, about in json.loads(file.read(length)).items() if name != "__metadata__"}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read, get it again: {error}") from error
    for name, about in header.items():
        if about["dtype"] not in _DTYPES:
            kind, readable = about["dtype"], ", ".join(_DTYPES)
            raise ValueError(f"{path}: {name} is {kind}; d1 reads {readable}, not quantised weights")
    return {
        name: StoredHeader(
            path=path,
            begin=_LENGTH_BYTES + length + about["data_offsets"][0],
            dtype=_DTYPES[about["dtype"]],
            shape=about["shape"],
        )
        for name, about in header.items()
    }


def _check_shapes(directory: Path, stored: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    """Raise ValueError that names what differs."""
    wrong = list(_differences(stored, expected))
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise ValueError(f"the weights in {directory} do not fit: {'; '.join(wrong[:_MOST_NAMED])}{more}")


def _differences(stored: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            yield f"there is no {name}; config.json makes {shape}"
        elif stored[name] != shape:
            yield f"{name} is {stored[name]}; config.json makes {shape}"
    for name in sorted(stored.keys() - expected.keys()):
        yield f"{name} is {stored[name]}; config.json makes no such tensor"


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
