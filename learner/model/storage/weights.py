"""Lazily read weights of a checkpoint, under our parameter names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from learner.model.attention.rotary import rope_frequencies
from learner.model.checkpoint_files import MODEL, load_config, shard_files, weight_files
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.families.layout import Piece, rows_of
from learner.model.families.wrapper_prefixes import is_rotary_buffer, plain_names
from learner.model.networks import make_meta_model
from learner.model.storage.reading import read_extents
from learner.model.storage.shards import read_shards
from learner.model.storage.tensors import StoredHeader, StoredTensor, read_header
from learner.model.storage.throughput import ReportProgress, Throughput

# A wrong config.json makes every tensor wrong: an error names this many of them and counts the others.
_MAX_NAMED = 3
# Chunk size of tensor comparison, in numbers.
_COMPARISON_CHUNK = 2**24


class StoredWeights(Mapping[str, "StoredTensor"]):
    """Weights of a checkpoint directory by our names, read from its files on access."""

    def __init__(self, directory: Path, config: TransformerConfig | None = None) -> None:
        """Read only the headers, which are small.

        `config` replaces the directory's own, if that is of another model type with the same tensors.
        Raises ValueError if there are no weights, or a tensor does not match the config.
        """
        self.directory = directory
        """The checkpoint's directory."""
        self.config = config or load_config(directory)
        """The policy's shape and family."""
        parameters = dict(make_meta_model(self.config).to(torch.bfloat16).named_parameters())
        shards = shard_files(directory, MODEL)
        self.has_foreign_names = bool(shards)
        """Whether its tensors have other names than in the family's original code."""
        self._tensors = self._of_shards(shards, parameters) if shards else self._of_family(parameters)
        of_policy = (self._tensors[name] for name, held in parameters.items() if held.dtype is torch.bfloat16)
        kinds = {tensor.stored[piece.stored].dtype for tensor in of_policy for piece in tensor.pieces}
        self.dtype = torch.bfloat16 if kinds == {torch.bfloat16} else torch.float32
        """Type to hold them in: bfloat16 if all but the routers' biases are stored in it, else float32."""

    def _of_shards(self, shards: list[Path], parameters: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
        """Open the weights that a learner's ranks wrote, which have our names."""
        found = {name: tensor for name, tensor in read_shards(shards).items() if isinstance(tensor, StoredTensor)}
        shapes = ({name: list(tensor.shape) for name, tensor in of.items()} for of in (found, parameters))
        _check_shapes(self.directory, *shapes)
        return found

    def _of_family(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
        """Open weights in the layout of the family's original code."""
        family = FAMILIES[self.config.family]
        layout = family.layout({name: held.shape for name, held in parameters.items()})
        found = _read_headers(weight_files(self.directory))
        stored, self.has_foreign_names = self._in_our_names(found)
        surplus = {name for name in stored.keys() - layout.stored_shapes.keys() if self._is_known_surplus(name)}
        shapes = {name: header.shape for name, header in stored.items() if name not in surplus}
        _check_shapes(self.directory, shapes, layout.stored_shapes)
        self._check_surplus({name: stored[name] for name in surplus}, stored[family.outer_names["embed.weight"]])
        return {name: StoredTensor(held.shape, layout.of_ours[name], stored) for name, held in parameters.items()}

    def _in_our_names(self, found: Mapping[str, StoredHeader]) -> tuple[dict[str, StoredHeader], bool]:
        """Return the tensors by the family's names, and whether any was stored under another name."""
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
        """Raise ValueError if a redundant tensor (rotary frequencies, tied head) contradicts the others."""
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
        self,
        destinations: Mapping[str, Tensor],
        rows: Mapping[str, slice] | None = None,
        report: ReportProgress | None = None,
    ) -> None:
        """Read tensors into destinations of any precision, on any device, in several threads.

        Args:
            destinations: contiguous tensors by our names.
            rows: the rows of a tensor that its destination holds; all rows for names that are not listed.
            report: receives progress messages with the rate of reading.

        Raises ValueError if a file has become shorter, OSError if it cannot be read.
        """
        extents = [
            extent
            for name, destination in destinations.items()
            for extent in self._tensors[name].extents((rows or {}).get(name, slice(None)), destination.detach())
        ]
        num_bytes = sum(extent.num_bytes for extent in extents)
        read_extents(extents, Throughput(f"loading {self.directory.name}", num_bytes, report))

    def iter_float32(self, names: Iterable[str], report: ReportProgress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by our names, in float32 on the CPU, reading one at a time and keeping none.

        `report` receives progress messages with the rate of reading. Raises as `read_into` does.
        """
        everything, tensors = slice(None), {name: self._tensors[name] for name in names}
        on_meta = (tensor.extents(everything, torch.empty(*tensor.shape, device="meta")) for tensor in tensors.values())
        num_bytes = sum(extent.num_bytes for extents in on_meta for extent in extents)
        progress = Throughput(f"loading {self.directory.name}", num_bytes, report)
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


def _whole(header: StoredHeader) -> StoredTensor:
    """Wrap a checkpoint's tensor in its stored layout."""
    piece = Piece(ours="", our_begin=0, stored="", stored_begin=0, num_rows=rows_of(header.shape))
    return StoredTensor(header.shape, [piece], {"": header})


def _are_equal(one: StoredHeader, other: StoredHeader) -> bool:
    """Whether two tensors hold the same numbers. A scalar or empty tensor equals no other."""
    if one.shape != other.shape or not math.prod(one.shape or [0]):
        return False
    step = max(1, _COMPARISON_CHUNK * one.shape[0] // math.prod(one.shape))
    parts, wider = range(0, one.shape[0], step), torch.promote_types(one.dtype, other.dtype)
    pairs = (tuple(_whole(each)[slice(begin, begin + step)].to(wider) for each in (one, other)) for begin in parts)
    return all(torch.equal(*pair) for pair in pairs)


def _are_frequencies(header: StoredHeader, expected: Tensor) -> bool:
    """Whether a tensor holds these frequencies, up to its precision."""
    if header.shape != list(expected.shape):
        return False
    # 16-bit types have at least 8 significant bits, and float16 has steps of 6e-8 near 0.
    relative, absolute = (2**-8, 6e-8) if header.dtype.itemsize == 2 else (1e-4, 0.0)
    return torch.allclose(_whole(header)[slice(None)].float(), expected, rtol=relative, atol=absolute)


def _read_headers(paths: Iterable[Path]) -> dict[str, StoredHeader]:
    """Read the headers of several files, by tensor name. Raises ValueError if two files differ in a tensor."""
    found: dict[str, StoredHeader] = {}
    for path in paths:
        for name, header in read_header(path).items():
            if name in found and not _are_equal(header, found[name]):
                raise ValueError(f"{name} is in {found[name].path} and in {path}; one of them is of another checkpoint")
            found[name] = header
    return found


def _check_shapes(directory: Path, stored: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    """Raise ValueError that names the tensors which differ."""
    wrong = list(_differences(stored, expected))
    if wrong:
        more = f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise ValueError(f"the weights in {directory} do not fit: {'; '.join(wrong[:_MAX_NAMED])}{more}")


def _differences(stored: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            yield f"there is no {name}; config.json makes {shape}"
        elif stored[name] != shape:
            yield f"{name} is {stored[name]}; config.json makes {shape}"
    for name in sorted(stored.keys() - expected.keys()):
        yield f"{name} is {stored[name]}; config.json makes no such tensor"
