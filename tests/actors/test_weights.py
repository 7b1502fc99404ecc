from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.checksums import Checksum, checksum_of, combine_checksums
from actors.weights.offering import in_pieces
from actors.weights.store import TensorEntry
from actors.weights.tensors import as_bytes, as_verified, make_manifest, manifest_of_shards, verify

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_verify_accepts_undamaged_weights() -> None:
    """Does not raise."""
    verify(make_manifest(3, WEIGHTS), {name: tensor.clone() for name, tensor in WEIGHTS.items()})


@pytest.mark.parametrize("change", ["value", "shape", "dtype", "missing", "extra"])
def test_verify_names_the_differing_tensor(change: str) -> None:
    arrived = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    if change == "value":
        arrived["b"][2] += 1
    elif change == "shape":
        arrived["b"] = arrived["b"].view(2, 2)
    elif change == "dtype":
        arrived["b"] = arrived["b"].view(torch.float16)
    elif change == "missing":
        del arrived["b"]
    else:
        arrived["c"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"policy version 3 arrived .* (tensor b differs|an unlisted tensor c)"):
        verify(make_manifest(3, WEIGHTS), arrived)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_pieces_have_every_tensor_once_and_similar_sizes(sizes: list[int], num_pieces: int) -> None:
    rows = {f"{index}": np.full(size, index, np.uint8) for index, size in enumerate(sizes)}
    pieces = in_pieces(rows, num_pieces)
    assert len(pieces) == num_pieces
    assert sorted(name for piece in pieces for name in piece) == sorted(rows)
    assert all(piece[name] is rows[name] for piece in pieces for name in piece)
    most = max((sum(array.nbytes for array in piece.values()) for piece in pieces), default=0)
    assert most <= sum(sizes) / num_pieces + max(sizes, default=0)


def test_a_damaged_base_is_named() -> None:
    arrived = {**WEIGHTS, "a": WEIGHTS["a"] + 1}
    with pytest.raises(ValueError, match=r"^base 0123 arrived damaged: tensor a differs"):
        verify(make_manifest(3, WEIGHTS), arrived, "base 0123")


def test_a_manifest_lists_shape_and_dtype() -> None:
    entry = make_manifest(3, WEIGHTS).tensors[1]
    assert (entry.name, entry.shape, entry.dtype) == ("b", (4,), "torch.bfloat16")
    assert replace(entry, checksum=0) != entry


def test_a_digest_does_not_depend_on_the_order_of_tensors() -> None:
    digest = make_manifest(3, WEIGHTS).digest
    assert make_manifest(4, dict(reversed(WEIGHTS.items()))).digest == digest
    assert make_manifest(3, WEIGHTS | {"a": WEIGHTS["a"] + 1}).digest != digest


def test_the_transfer_timeout_grows_with_the_size() -> None:
    """At the slowest tolerated rate, all of 8B parameters take eleven minutes."""
    manifest = make_manifest(3, WEIGHTS)
    assert [entry.num_bytes for entry in manifest.tensors] == [6 * 4, 4 * 2]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bfloat16, torch.int64):
        entry = TensorEntry(name="w", shape=(3, 2), dtype=str(dtype), checksum=0)
        assert entry.num_bytes == 6 * dtype.itemsize
    assert manifest.transfer_timeout_s(10.0) == pytest.approx(10 + 32 / 50e6)
    whole = replace(manifest, tensors=(replace(manifest.tensors[0], shape=(8_000_000_000,)),))
    assert whole.transfer_timeout_s(120.0) == pytest.approx(120 + 640)


@given(st.lists(st.binary(max_size=70)))
def test_combined_checksums_equal_that_of_the_whole(parts: list[bytes]) -> None:
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
    whole = b"".join(parts)
    assert checksum_of(arrays) == combine_checksums(checksum_of([array]) for array in arrays)
    assert checksum_of(arrays) == Checksum(num_bytes=len(whole), checksum=crc32(whole))


def test_combined_checksums_of_a_gigabyte_equal_that_of_the_whole() -> None:
    """Covers bits of the length that are too large for written test data: one byte after a gigabyte of zeros."""
    zeros = np.zeros(2**20 + 1, dtype=np.uint8)
    gigabyte, one = combine_checksums([checksum_of([zeros])] * 1024), Checksum(num_bytes=1, checksum=crc32(b"x"))
    expected = 0
    for _ in range(1024):
        expected = crc32(zeros.data, expected)
    assert combine_checksums([gigabyte, one]).checksum == crc32(b"x", expected)


def _shards(first: int) -> list[dict[str, torch.Tensor]]:
    """Shards of two ranks: `a` by rows, the first `first` of them on rank 0; `b` is not sharded."""
    return [{"a": WEIGHTS["a"][:first], "b": WEIGHTS["b"]}, {"a": WEIGHTS["a"][first:]}]


def test_shards_are_concatenated_only_on_access(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{name: as_bytes(tensor) for name, tensor in shard.items()} for shard in _shards(1)]
    monkeypatch.setattr(torch, "cat", lambda _: pytest.fail("it is put together"))
    arrived = as_verified(make_manifest(3, WEIGHTS), parts)
    assert "a" in arrived
    assert not arrived.keys() ^ WEIGHTS.keys()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_shards_have_the_manifest_of_full_weights(first: int) -> None:
    parts = [{name: as_bytes(tensor) for name, tensor in shard.items()} for shard in _shards(first)]
    ranks = [{name: checksum_of([rows]) for name, rows in part.items()} for part in parts]
    shapes, dtypes = ({name: getattr(tensor, of) for name, tensor in WEIGHTS.items()} for of in ("shape", "dtype"))
    manifest = manifest_of_shards(3, shapes, dtypes, ranks)
    assert manifest == make_manifest(3, WEIGHTS)
    arrived = as_verified(manifest, parts)
    assert list(arrived) == ["a", "b"]
    assert all(torch.equal(arrived[name], tensor) for name, tensor in WEIGHTS.items())
    assert [len(piece) for piece in arrived.pieces("a")] == ([1, 1] if first == 1 else [2])
    assert all(np.shares_memory(arrived.pieces("b")[0].view(torch.uint8), part["b"]) for part in parts[:1])


@pytest.mark.parametrize("change", ["swapped", "missing", "damaged", "unlisted"])
def test_incomplete_or_damaged_shards_are_named(change: str) -> None:
    manifest = make_manifest(3, WEIGHTS)
    parts = [{name: as_bytes(tensor).copy() for name, tensor in shard.items()} for shard in _shards(1)]
    if change == "swapped":
        parts.reverse()
    elif change == "missing":
        parts.pop()
    elif change == "damaged":
        parts[1]["a"][0] ^= 1
    else:
        parts[1]["c"] = parts[0]["b"]
    named = "with an unlisted tensor c" if change == "unlisted" else "damaged: tensor a differs"
    with pytest.raises(ValueError, match=f"^policy version 3 arrived {named}"):
        as_verified(manifest, parts)
