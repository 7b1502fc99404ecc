"""Fetching policy versions: whole weights, or an adapter on a checkpoint of the run."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import GetTimeoutError
from torch import Tensor

from actors.messages import WeightsId
from actors.weights.fetching import PolicyLoader, PrefetchingReader, StoreReader, load_in_place
from actors.weights.store import Manifest, VersionMissingError
from actors.weights.tensors import ReceivedTensors, make_manifest
from learner.model.adapter import Adapter
from learner.model.checkpoint import save_checkpoint
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest
from learner.model.config import TransformerConfig
from learner.model.lora import adapter_names, merge_adapters, merge_weight
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import Transformer, init_weights

SCALING = 0.37
ADAPTED = ("blocks.0.attn.q_proj.weight", "blocks.1.mlp.down_proj.weight")
Version = tuple[Manifest, dict[str, Tensor]]


class Shelf:
    """A store in this process that counts its reads."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}

    def version(self, version: int, digest: str | None = None) -> Version:
        return self.versions[version]

    def put(self, version: int, weights: dict[str, Tensor], base: BaseCheckpoint | None = None) -> WeightsId:
        manifest = make_manifest(version, weights, base)
        self.versions[version] = manifest, weights
        return WeightsId(version=version, digest=manifest.digest)


def _policy(config: TransformerConfig, seed: int, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed)
    return model.to(dtype)


def _base(config: TransformerConfig, seed: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in _policy(config, seed).state_dict().items()}


def _adapter(base: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name in ADAPTED:
        layer, (outputs, inputs) = name.removesuffix(".weight"), base[name].shape
        adapter[f"{layer}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
        adapter[f"{layer}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    return adapter


class Checkpoints:
    """A run's checkpoints: the initial one, and one of SFT that trained an adapter on it."""

    def __init__(self, directory: Path, config: TransformerConfig, dtype: torch.dtype) -> None:
        self.directory = directory
        weights = {name: tensor.to(dtype) for name, tensor in _base(config, 1).items()}
        save_checkpoint(directory / "initial", config, weights, directory)
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        self.sft = Adapter(rank=4, alpha=2, base="initial", matrices=_adapter(self.weights, 11))
        save_checkpoint(directory / "sft", config, None, directory, adapter=self.sft)

    def base(self, name: str) -> BaseCheckpoint:
        return BaseCheckpoint(checkpoint=name, digest=chain_digest(self.directory / name), scaling=SCALING)


def _assert_computes(
    policy: Transformer, weights: dict[str, Tensor], *adapters: tuple[dict[str, Tensor], float]
) -> None:
    """Assert that the policy's merged weights are these weights plus these adapters."""
    atol = 1e-5 if policy.embed.weight.dtype == torch.float32 else 0.05
    merged_policy = copy.deepcopy(policy).float()
    merge_adapters(merged_policy)
    for name, tensor in merged_policy.state_dict().items():
        expected = weights[name].to(policy.embed.weight.dtype).float()
        for matrices, scaling in adapters:
            a, b = adapter_names(name)
            if a in matrices:
                expected = merge_weight(expected, matrices[a], matrices[b], scaling)
        torch.testing.assert_close(tensor, expected, atol=atol, rtol=0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path, config: TransformerConfig) -> Checkpoints:
    """In float32 and in bfloat16."""
    return Checkpoints(tmp_path, config, request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_combines_base_weights_earlier_adapters_and_its_own(
    config: TransformerConfig, dtype: torch.dtype, checkpoints: Checkpoints
) -> None:
    shelf, policy = Shelf(), _policy(config, 2, dtype)
    loader, whole = PolicyLoader(policy, shelf, checkpoints.directory), checkpoints.weights
    for version, base in enumerate(("initial", "initial", "sft", "sft", "initial")):
        adapter = _adapter(whole, version)
        loader.load(shelf.put(version, adapter, checkpoints.base(base)))
        before = [(checkpoints.sft.matrices, checkpoints.sft.scaling)] if base == "sft" else []
        _assert_computes(policy, whole, *before, (adapter, SCALING))
    # In the policy's precision, and at unchanged addresses.
    held = {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}
    loader.load(shelf.put(9, _adapter(whole, 9), checkpoints.base("initial")))
    assert {name: tensor.data_ptr() for name, tensor in policy.named_parameters()} == held
    assert {tensor.dtype for tensor in policy.parameters()} == {dtype}


def test_base_weights_are_read_once(
    config: TransformerConfig, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, loads = Shelf(), []
    monkeypatch.setattr(StoredWeights, "read_into", lambda weights, _: loads.append(weights))
    loader = PolicyLoader(_policy(config, 2), shelf, checkpoints.directory)
    for version, base in enumerate(("initial", "initial", "sft", "sft", "initial")):
        loader.load(shelf.put(version, _adapter(checkpoints.weights, version), checkpoints.base(base)))
    assert len(loads) == 1
    loader.forget_base()
    loader.load(shelf.put(9, _adapter(checkpoints.weights, 9), checkpoints.base("sft")))
    assert len(loads) == 2


def test_a_failed_load_is_followed_by_a_full_reload(config: TransformerConfig, checkpoints: Checkpoints) -> None:
    shelf, policy, whole = Shelf(), _policy(config, 0), checkpoints.weights
    loader, broken = PolicyLoader(policy, shelf, checkpoints.directory), _adapter(whole, 1)
    broken["blocks.1.mlp.down_proj.lora_B.weight"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"its matrices for blocks\.1\.mlp\.down_proj are \[1, 1\]"):
        loader.load(shelf.put(1, broken, checkpoints.base("sft")))
    adapter = _adapter(whole, 2)
    loader.load(shelf.put(2, adapter, checkpoints.base("sft")))
    sft = checkpoints.sft.matrices, checkpoints.sft.scaling
    _assert_computes(policy, whole, sft, (adapter, SCALING))


@pytest.mark.parametrize("hurt", ["weights", "adapter", "manifest", "gone"])
def test_the_base_of_an_adapter_is_verified(
    config: TransformerConfig, checkpoints: Checkpoints, hurt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.weights.fetching._VISIBLE_WITHIN_S", 0.0)
    shelf, base = Shelf(), checkpoints.base("sft")
    directory = checkpoints.directory
    if hurt == "gone":
        shutil.rmtree(directory / "sft")
    else:
        path = {
            "weights": directory / "initial" / "model.safetensors",
            "adapter": directory / "sft" / "lora.safetensors",
            "manifest": directory / "initial" / "manifest.json",
        }[hurt]
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    loader = PolicyLoader(_policy(config, 0), shelf, directory)
    words = {
        "weights": r"model\.safetensors is damaged",
        "adapter": r"lora\.safetensors is damaged",
        "manifest": "is not the checkpoint that the adapter was trained on",
        "gone": "the base checkpoint sft of an adapter is not in",
    }
    with pytest.raises(ValueError, match=words[hurt]):
        loader.load(shelf.put(1, _adapter(checkpoints.weights, 1), base))


def test_a_base_checkpoint_that_appears_late_is_waited_for(
    config: TransformerConfig, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems may show a rename late to other machines."""
    shelf, base, sft = Shelf(), checkpoints.base("sft"), checkpoints.directory / "sft"
    sft.rename(checkpoints.directory / "away")
    monkeypatch.setattr("time.sleep", lambda _: (checkpoints.directory / "away").rename(sft))
    policy, adapter = _policy(config, 0), _adapter(checkpoints.weights, 1)
    PolicyLoader(policy, shelf, checkpoints.directory).load(shelf.put(1, adapter, base))
    before = checkpoints.sft.matrices, checkpoints.sft.scaling
    _assert_computes(policy, checkpoints.weights, before, (adapter, SCALING))


def test_full_weights_replace_the_policy_and_foreign_adapters_are_refused(
    config: TransformerConfig, checkpoints: Checkpoints
) -> None:
    shelf, policy, other = Shelf(), _policy(config, 0), _base(config, 5)
    loader = PolicyLoader(policy, shelf, checkpoints.directory)
    loader.load(shelf.put(1, other))
    _assert_is(policy, other)
    unknown = {name.replace("down_proj", "side_proj"): matrix for name, matrix in _adapter(other, 1).items()}
    with pytest.raises(ValueError, match="which is no linear layer of this policy"):
        loader.load(shelf.put(2, unknown, checkpoints.base("initial")))


def _assert_is(policy: Transformer, weights: dict[str, Tensor]) -> None:
    state = policy.state_dict()
    assert state.keys() == weights.keys()
    different = [name for name, tensor in state.items() if not torch.equal(tensor, weights[name].to(tensor.dtype))]
    assert different == []


def test_a_digest_covers_adapter_base_and_scaling_unless_overridden(config: TransformerConfig) -> None:
    base = _base(config, 1)
    adapter = _adapter(base, 1)
    on = BaseCheckpoint(checkpoint="initial", digest="a" * 64, scaling=SCALING)
    digest = make_manifest(1, adapter, on).digest
    assert make_manifest(2, adapter, on).digest == digest
    others = (replace(on, digest="b" * 64), replace(on, scaling=1.0), replace(on, base_weights="nf4"), None)
    assert len({digest, *(make_manifest(1, adapter, other).digest for other in others)}) == 5
    assert make_manifest(1, adapter, on, digest_override="c" * 64).digest == "c" * 64


def test_sharded_weights_are_loaded_row_by_row(config: TransformerConfig) -> None:
    policy, weights = _policy(config, 0, torch.bfloat16), _base(config, 1)
    in_pieces = ReceivedTensors({name: tensor.split(3) for name, tensor in weights.items()})
    load_in_place(policy, in_pieces)
    _assert_is(policy, weights)


@pytest.mark.parametrize("change", ["missing", "unknown", "rows", "columns"])
def test_weights_of_another_policy_are_refused(config: TransformerConfig, change: str) -> None:
    policy, weights = _policy(config, 0), {name: (tensor,) for name, tensor in _base(config, 1).items()}
    (norm,) = weights["norm.weight"]
    if change == "missing":
        del weights["norm.weight"]
    elif change == "unknown":
        weights["norm.bias"] = weights["norm.weight"]
    else:
        weights["norm.weight"] = (norm[1:],) if change == "rows" else (norm[:, None],)
    with pytest.raises(ValueError, match=r"^these are not the weights of this policy.* norm\."):
        load_in_place(policy, ReceivedTensors(weights))


class LateStore:
    """A weight store that answers, but whose tensors never arrive."""

    class _Call:
        def __init__(self, answer: object) -> None:
            self.remote = lambda *_: answer

    def __init__(self, manifest: Manifest) -> None:
        self.get = self._Call((manifest, ["tensors"]))


def test_the_fetch_timeout_grows_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(3, {"a": torch.zeros(4)})
    wide = replace(manifest, tensors=(replace(manifest.tensors[0], shape=(2_000_000_000,)),))
    waited: list[float] = []

    def get(what: object, timeout: float) -> object:
        waited.append(timeout)
        if what == ["tensors"]:
            raise GetTimeoutError
        return what

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    with pytest.raises(TimeoutError, match="policy version 3 did not arrive within 190 s"):
        StoreReader(LateStore(wide), 30.0).version(3)
    assert waited == pytest.approx([30.0, 190.0], abs=1)


class SlowShelf(Shelf):
    """A store that records its reads and answers when the test allows."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def version(self, version: int, digest: str | None = None) -> Version:
        self.asked.append(version)
        assert self.may_answer.wait(20)
        if version not in self.versions:
            raise VersionMissingError(f"policy version {version} is not in the store")
        return super().version(version, digest)


@pytest.fixture
def staged() -> tuple[SlowShelf, list[WeightsId], PrefetchingReader]:
    shelf = SlowShelf()
    made = [shelf.put(version, {"a": torch.full((3,), float(version))}) for version in (0, 1)]
    return shelf, made, PrefetchingReader(shelf)


def test_prefetched_weights_are_returned_once_and_released(
    staged: tuple[SlowShelf, list[WeightsId], PrefetchingReader],
) -> None:
    shelf, (first, second), reader = staged
    reader.prefetch(second)
    reader.prefetch(second)
    assert reader.version(first.version, first.digest)[1]["a"].tolist() == [0.0] * 3
    assert shelf.asked == [1, 0], "another one is fetched as ever"
    assert reader.version(second.version, second.digest)[1]["a"].tolist() == [1.0] * 3
    assert shelf.asked == [1, 0]
    reader.version(second.version, second.digest)
    assert shelf.asked == [1, 0, 1]


def test_a_prefetched_version_with_another_digest_is_not_used(
    staged: tuple[SlowShelf, list[WeightsId], PrefetchingReader],
) -> None:
    shelf, (first, _), reader = staged
    reader.prefetch(first)
    reader.version(first.version, "another digest")
    assert shelf.asked == [0, 0]


def test_a_read_during_a_prefetch_waits_for_it(
    staged: tuple[SlowShelf, list[WeightsId], PrefetchingReader],
) -> None:
    shelf, (first, _), reader = staged
    shelf.may_answer.clear()
    with ThreadPoolExecutor(2) as pool:
        staging = pool.submit(reader.prefetch, first)
        while not shelf.asked:
            time.sleep(0.001)
        asking = pool.submit(reader.version, first.version, first.digest)
        time.sleep(0.05)
        assert not asking.done()
        shelf.may_answer.set()
        assert asking.result(20)[0].version == 0
        staging.result(20)
    assert shelf.asked == [0]


def test_a_failed_prefetch_is_retried_by_the_next_read(
    staged: tuple[SlowShelf, list[WeightsId], PrefetchingReader],
) -> None:
    shelf, (_, second), reader = staged
    gone = shelf.versions.pop(1)
    reader.prefetch(second)
    with pytest.raises(VersionMissingError, match="policy version 1 is not in the store"):
        reader.version(second.version, second.digest)
    reader.prefetch(second)
    shelf.versions[1] = gone
    assert reader.version(second.version, second.digest)[0].version == 1
