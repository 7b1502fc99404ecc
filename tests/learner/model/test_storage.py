"""Checkpoint files: read in threads, hashed once, and referenced in place."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
import torch

from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.checkpoint_files import max_float32_bytes, verify_checkpoint, weight_files
from learner.model.storage import hashing, reading
from learner.model.storage.hashing import checksums
from learner.model.storage.reading import Extent, read_extents
from learner.model.storage.references import REFERENCES, check_unchanged
from learner.model.storage.throughput import Throughput
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import make_tokenizer
from learner.model.transformer import Transformer
from tests.simulated.stand_in_gpu import stand_in_gpu

_SETTLED_S = 10


@pytest.fixture
def original(policy: Transformer, tmp_path: Path) -> Path:
    """A checkpoint in three files."""
    make_tokenizer(["3 7 9 = 24"], tmp_path / "tokenizer", 300)
    save_checkpoint(
        tmp_path / "original", policy.config, policy.state_dict(), tmp_path / "tokenizer", shard_bytes=32_000
    )
    return tmp_path / "original"


@pytest.fixture
def referring(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that refers to the original's files."""
    stored = StoredWeights(original)
    save_checkpoint(tmp_path / "run" / "initial", stored.config, stored, original, trainer_state={"round": 0})
    return tmp_path / "run" / "initial"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_tensors_read_in_pieces_are_bit_identical(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 1000)
    whole = torch.randn(70, 43).to(torch.bfloat16)
    (tmp_path / "a").write_bytes(b"before" + whole.view(torch.uint8).numpy().tobytes())
    found = torch.full((70, 43), torch.nan, dtype=dtype)
    progress = Throughput("loading", 70 * 43 * 2)
    extent = Extent(path=tmp_path / "a", begin=6, dtype=torch.bfloat16, destination=found.view(-1))
    assert len(list(extent.chunks())) == 7
    read_extents([extent], progress)
    assert torch.equal(found, whole.to(dtype))
    assert progress.num_bytes == 70 * 43 * 2


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    extents = [
        Extent(path=tmp_path / "a", begin=40 * place, dtype=torch.float32, destination=torch.empty(10, dtype=kind))
        for place, kind in enumerate([torch.float32, torch.bfloat16, torch.bfloat16])
    ]
    with pytest.raises(ValueError, match=r"a cannot be read, get it again: it ends at byte 100"):
        read_extents(extents)


def test_a_policy_is_read_to_a_gpu_through_small_buffers(original: Path, policy: Transformer) -> None:
    with stand_in_gpu():
        loaded = load_policy(original, torch.float32, "cuda")
        assert {parameter.device.type for parameter in loaded.parameters()} == {"cuda"}
        found = {name: parameter.detach().cpu() for name, parameter in loaded.named_parameters()}
    assert [name for name, tensor in policy.state_dict().items() if not torch.equal(found[name], tensor)] == []


def test_hashes_are_cached_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(path.name.encode() * 5000)
        os.utime(path, (time.time() - _SETTLED_S,) * 2)
    # The ctime of a file cannot be set.
    monkeypatch.setattr(hashing, "_SETTLED_NS", -1)
    expected = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert checksums(paths) == expected
    monkeypatch.setattr(hashing, "hashlib", None)
    progress = Throughput("checking", 10_000)
    assert checksums(paths, progress) == expected
    assert progress.num_bytes == 10_000
    paths[0].write_bytes(b"c" * 5000)
    with pytest.raises(AttributeError):
        checksums(paths)


def test_recently_written_files_are_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next change may have the same timestamp: here all have, as on a file system with a coarse clock."""
    path = tmp_path / "a"
    path.write_bytes(b"0")
    about = path.stat()
    monkeypatch.setattr(os, "fstat", lambda file: about)
    for content in (b"1", b"2", b"3"):
        path.write_bytes(content)
        assert checksums([path])[path] == hashlib.sha256(content).hexdigest()


def test_throughput_is_reported_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Throughput("loading sft", 4_000_000_000, said.append)
    for _ in range(8):
        now[0] += 0.3
        progress.add(500_000_000)
    assert said == ["loading sft: 2.0 of 4.0 GB, 1.7 GB/s", "loading sft: 4.0 of 4.0 GB, 1.7 GB/s"]


def test_a_checkpoint_of_references_loads_the_same_policy(policy: Transformer, original: Path, referring: Path) -> None:
    assert list(referring.glob("*.safetensors")) == []
    assert weight_files(referring) == weight_files(original)
    assert max_float32_bytes(referring) == max_float32_bytes(original) > 2 * 60_000
    assert stored_dtype(referring) is torch.float32
    loaded = load_policy(referring)
    assert loaded.config == policy.config
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in policy.state_dict().items())
    verify_checkpoint(referring)
    check_unchanged(referring)


def test_references_to_references_name_the_original_files(original: Path, referring: Path, tmp_path: Path) -> None:
    stored = StoredWeights(referring)
    save_checkpoint(tmp_path / "other" / "initial", stored.config, stored, referring)
    assert weight_files(tmp_path / "other" / "initial") == weight_files(original)


def test_a_missing_referenced_file_is_named(original: Path, referring: Path) -> None:
    gone = weight_files(original)[1]
    gone.unlink()
    sentence = (
        f"{referring} refers to {gone} for its weights, and this machine has no such file; put it back, or start a new "
        "run"
    )
    for look in (weight_files, load_policy, verify_checkpoint, check_unchanged):
        with pytest.raises(ValueError, match="no such file") as refused:
            look(referring)
        assert str(refused.value) == sentence


def test_a_changed_referenced_file_is_named(original: Path, referring: Path) -> None:
    changed = weight_files(original)[1]
    os.utime(changed, (1, 1))
    # Unchanged content passes, whatever its timestamp.
    check_unchanged(referring)
    whole = changed.read_bytes()
    changed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for look in (verify_checkpoint, check_unchanged):
        with pytest.raises(ValueError, match="was changed") as refused:
            look(referring)
        assert str(refused.value) == (
            f"{changed} was changed since {referring} was made, which refers to it for its weights; put the original "
            "file back, or start a new run"
        )


def test_files_next_to_a_reference_are_used_and_verified(original: Path, referring: Path) -> None:
    """As for a copy on another machine, where the referenced path does not exist."""
    for path in weight_files(original):
        path.rename(referring / path.name)
    assert {path.parent for path in weight_files(referring)} == {referring}
    load_policy(referring)
    verify_checkpoint(referring)
    check_unchanged(referring)
    with weight_files(referring)[0].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match="was changed since"):
        verify_checkpoint(referring)


@pytest.mark.parametrize(
    "listed",
    [
        "[]",
        "{",
        '{"a.safetensors": 3}',
        '{"a.safetensors": {"path": "/x/a.safetensors", "sha256": "0", "size": 1, "mtime_ns": 1}}',
        '{"a.safetensors": {"path": ["/x/a.safetensors"], "sha256": "SHA", "size": 1, "mtime_ns": 1}}',
        '{"a.bin": {"path": "/x/a.bin", "sha256": "SHA", "size": 1, "mtime_ns": 1}}',
        '{"a.safetensors": {"path": "/x/b.safetensors", "sha256": "SHA", "size": 1, "mtime_ns": 1}}',
        '{"a.safetensors": {"path": "a.safetensors", "sha256": "SHA", "size": 1, "mtime_ns": 1}}',
    ],
)
def test_an_invalid_list_of_references_is_refused(referring: Path, listed: str) -> None:
    (referring / REFERENCES).write_text(listed.replace("SHA", "0" * 64))
    with pytest.raises(ValueError, match=r"weights\.json is damaged: it does not list weight files"):
        weight_files(referring)


def test_the_list_of_references_is_verified(referring: Path) -> None:
    path = referring / REFERENCES
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"weights\.json is damaged: it is not what manifest\.json lists"):
        verify_checkpoint(referring)


def test_the_storages_of_a_loaded_policy_can_be_resized(original: Path) -> None:
    """An offloaded learner frees its memory by resizing storages."""
    for parameter in load_policy(original).parameters():
        storage = parameter.detach().untyped_storage()
        storage.resize_(0)
        assert storage.nbytes() == 0
