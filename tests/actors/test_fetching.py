"""Policy versions as they arrive: whole, or as an adapter on a base that stays."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from ray.exceptions import GetTimeoutError
from torch import Tensor

from actors.messages import Generation
from actors.weights.fetching import PolicyLoader, StagingReader, StoreReader, load_in_place, whole_version
from actors.weights.store import Base, Manifest, VersionMissingError
from actors.weights.tensors import Arrived, make_manifest
from learner.model.config import TransformerConfig
from learner.model.lora import merged
from learner.model.transformer import Transformer, init_weights
from learner.parallel.sharding import narrowed

SCALING = 0.37
ADAPTED = ("blocks.0.attn.q_proj.weight", "blocks.1.mlp.down_proj.weight")
Version = tuple[Manifest, dict[str, Tensor]]


class Shelf:
    """A store in this process, that counts."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self.bases: dict[str, dict[str, Tensor]] = {}
        self.num_bases_read = 0

    def version(self, version: int, digest: str | None = None) -> Version:
        return self.versions[version]

    def base(self, digest: str) -> dict[str, Tensor]:
        self.num_bases_read += 1
        return self.bases[digest]

    def put_base(self, weights: dict[str, Tensor]) -> str:
        digest = make_manifest(0, weights).digest
        self.bases[digest] = weights
        return digest

    def put(self, version: int, weights: dict[str, Tensor], base: str | None = None) -> Generation:
        on = None if base is None else Base(digest=base, scaling=SCALING)
        manifest = make_manifest(version, weights, on)
        self.versions[version] = manifest, weights
        return Generation(version=version, digest=manifest.digest)


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


def _merged_first(base: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the learner would have gathered and sent."""
    whole = dict(base)
    for name in ADAPTED:
        layer = name.removesuffix(".weight")
        matrices = (adapter[f"{layer}.lora_{which}.weight"] for which in "AB")
        whole[name] = merged(base[name], *matrices, SCALING)  # type: ignore[call-arg]
    return whole


def _assert_is(policy: Transformer, weights: dict[str, Tensor]) -> None:
    state = policy.state_dict()
    assert state.keys() == weights.keys()
    different = [name for name, tensor in state.items() if not torch.equal(tensor, weights[name].to(tensor.dtype))]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_merged_on_arrival_gives_the_bits_of_one_that_was_merged_first(
    config: TransformerConfig, dtype: torch.dtype, of_base: torch.dtype
) -> None:
    """Also where the base was a checkpoint in bfloat16, and travelled so."""
    base = {name: tensor.to(of_base).float() for name, tensor in _base(config, 1).items()}
    travelled = {name: narrowed(tensor) for name, tensor in base.items()}
    # Norms begin as ones, which are ones in bfloat16 too.
    assert travelled[ADAPTED[0]].dtype == of_base
    shelf, policy = Shelf(), _policy(config, 2, dtype)
    digest, loader = shelf.put_base(travelled), PolicyLoader(policy, shelf)
    for version in (1, 2, 3):
        adapter = _adapter(base, version)
        loader.load(shelf.put(version, adapter, digest))
        expected = _merged_first(base, adapter)
        _assert_is(policy, expected)
        whole = whole_version(shelf, version)
        assert [name for name, tensor in expected.items() if not torch.equal(whole[name].float(), tensor)] == []
    assert shelf.num_bases_read == 1 + 3, "once by the loader"


def test_another_base_and_whole_weights_take_the_place_of_a_base(config: TransformerConfig) -> None:
    shelf, policy = Shelf(), _policy(config, 0)
    loader = PolicyLoader(policy, shelf)
    bases = [_base(config, seed) for seed in (1, 2)]
    digests = [shelf.put_base(base) for base in bases]
    for version, (base, digest) in enumerate(zip(bases, digests, strict=True)):
        adapter = _adapter(base, version)
        loader.load(shelf.put(version, adapter, digest))
        _assert_is(policy, _merged_first(base, adapter))
    loader.load(shelf.put(7, bases[0]))
    _assert_is(policy, bases[0])
    loader.load(shelf.put(8, adapter, digests[1]))
    _assert_is(policy, _merged_first(bases[1], adapter))
    assert shelf.num_bases_read == 3


def test_after_a_first_merge_that_failed_all_of_the_base_is_loaded_again(config: TransformerConfig) -> None:
    shelf, policy, base = Shelf(), _policy(config, 0), _base(config, 1)
    loader, digest, broken = PolicyLoader(policy, shelf), shelf.put_base(base), _adapter(base, 1)
    broken["blocks.1.mlp.down_proj.lora_B.weight"] = torch.zeros(1, 1)
    with pytest.raises(RuntimeError, match="shape"):
        loader.load(shelf.put(1, broken, digest))
    adapter = _adapter(base, 2)
    loader.load(shelf.put(2, adapter, digest))
    _assert_is(policy, _merged_first(base, adapter))


def test_a_digest_is_of_adapter_base_and_scaling_or_the_one_that_the_weights_had(config: TransformerConfig) -> None:
    base = _base(config, 1)
    adapter = _adapter(base, 1)
    on = Base(digest="a" * 64, scaling=SCALING)
    digest = make_manifest(1, adapter, on).digest
    assert make_manifest(2, adapter, on).digest == digest
    others = (replace(on, digest="b" * 64), replace(on, scaling=1.0), None)
    assert len({digest, *(make_manifest(1, adapter, other).digest for other in others)}) == 4
    assert make_manifest(1, adapter, on, known_as="c" * 64).digest == "c" * 64


def test_weights_that_come_in_shards_are_loaded_row_by_row(config: TransformerConfig) -> None:
    policy, weights = _policy(config, 0, torch.bfloat16), _base(config, 1)
    in_pieces = Arrived({name: tensor.split(3) for name, tensor in weights.items()})
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
        load_in_place(policy, Arrived(weights))


def test_weights_are_narrowed_only_where_nothing_is_lost() -> None:
    exact, inexact = torch.tensor([1.0, -2.5, 0.0]), torch.tensor([1.0, 0.1])
    assert narrowed(exact).dtype == torch.bfloat16
    assert narrowed(inexact) is inexact
    assert narrowed(torch.tensor([float("nan")])).dtype == torch.float32, "a NaN's bits may say something"


class LateStore:
    """A weight store whose answers come, and whose tensors do not."""

    class _Call:
        def __init__(self, answer: object) -> None:
            self.remote = lambda *_: answer

    def __init__(self, manifest: Manifest) -> None:
        self.get = self._Call((manifest, ["tensors"]))


def test_tensors_are_waited_for_as_long_as_their_bytes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(3, {"a": torch.zeros(4)})
    wide = replace(manifest, tensors=(replace(manifest.tensors[0], shape=(2_000_000_000,)),))
    waited: list[float] = []

    def get(what: object, timeout: float) -> object:
        waited.append(timeout)
        if what == ["tensors"]:
            raise GetTimeoutError
        return what

    monkeypatch.setattr("ray.get", get)
    with pytest.raises(TimeoutError, match="policy version 3 did not arrive within 190 s"):
        StoreReader(LateStore(wide), 30.0).version(3)
    assert waited == [30.0, 190.0]


class SlowShelf(Shelf):
    """Counts what it is asked for, and answers when it may."""

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
def staged() -> tuple[SlowShelf, list[Generation], StagingReader]:
    shelf = SlowShelf()
    made = [shelf.put(version, {"a": torch.full((3,), float(version))}) for version in (0, 1)]
    return shelf, made, StagingReader(shelf)


def test_what_is_staged_is_handed_over_once_and_held_no_longer(
    staged: tuple[SlowShelf, list[Generation], StagingReader],
) -> None:
    shelf, (first, second), reader = staged
    reader.stage(second)
    reader.stage(second)
    assert reader.version(first.version, first.digest)[1]["a"].tolist() == [0.0] * 3
    assert shelf.asked == [1, 0], "another one is fetched as ever"
    assert reader.version(second.version, second.digest)[1]["a"].tolist() == [1.0] * 3
    assert shelf.asked == [1, 0]
    reader.version(second.version, second.digest)
    assert shelf.asked == [1, 0, 1]


def test_other_weights_of_the_same_number_are_not_what_was_staged(
    staged: tuple[SlowShelf, list[Generation], StagingReader],
) -> None:
    shelf, (first, _), reader = staged
    reader.stage(first)
    reader.version(first.version, "another digest")
    assert shelf.asked == [0, 0]


def test_who_asks_while_it_is_fetched_waits_for_that(
    staged: tuple[SlowShelf, list[Generation], StagingReader],
) -> None:
    shelf, (first, _), reader = staged
    shelf.may_answer.clear()
    with ThreadPoolExecutor(2) as pool:
        staging = pool.submit(reader.stage, first)
        while not shelf.asked:
            time.sleep(0.001)
        asking = pool.submit(reader.version, first.version, first.digest)
        time.sleep(0.05)
        assert not asking.done()
        shelf.may_answer.set()
        assert asking.result(20)[0].version == 0
        staging.result(20)
    assert shelf.asked == [0]


def test_what_could_not_be_staged_is_fetched_again_by_who_asks(
    staged: tuple[SlowShelf, list[Generation], StagingReader],
) -> None:
    shelf, (_, second), reader = staged
    gone = shelf.versions.pop(1)
    reader.stage(second)
    with pytest.raises(VersionMissingError, match="policy version 1 is not in the store"):
        reader.version(second.version, second.digest)
    reader.stage(second)
    shelf.versions[1] = gone
    assert reader.version(second.version, second.digest)[0].version == 1
