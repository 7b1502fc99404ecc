"""Publication to the weight store: all parameters, or with LoRA an adapter on a base sent once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from actors.messages import Next, WeightsId
from actors.spec import Phase
from actors.training.publication import Publisher
from actors.training.shards import TransferFormat
from actors.weights.store import Manifest
from actors.weights.tensors import make_manifest, verify
from learner.model.checkpoint_files import BaseCheckpoint
from learner.model.config import TransformerConfig
from learner.model.lora import adapter_names, merge_weight
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.networks import make_model
from learner.model.transformer import init_weights
from learner.parallel.consensus import Ranks
from learner.parallel.sharding import ShardedPolicy, make_mesh
from tests.actors.offered import Offers
from tests.ranks import run_ranks

ADAPTER = LoraConfig(rank=4, alpha=8)


class Store:
    """A fake store and coordinator that record what they receive, and may lose it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.weights: list[dict[str, Tensor]] = []
        self.digests: list[str] = []
        self.base: dict[str, Tensor] = {}
        """The base weights of adapters."""
        self.forgets = 0
        """The number of upcoming offers that are unknown when they are taken."""
        self._offers = Offers()

    def offer(self, key: str, rank: int, shards: Mapping[str, Tensor]) -> None:
        self._offers.offer(key, shards)

    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool:
        if self.forgets:
            self.forgets -= 1
            return False
        self.publish(manifest, self._offers.taken(manifest, key, num_ranks))
        return True

    def withdraw(self) -> None:
        self._offers = Offers()

    def publish(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> None:
        verify(manifest, weights)
        if manifest.base is None:
            self.weights.append(dict(weights))
        else:
            assert manifest.base.scaling == ADAPTER.scaling
            whole = dict(self.base)
            for name in self.base:
                a, b = adapter_names(name)
                if a in weights:
                    whole[name] = merge_weight(self.base[name], weights[a], weights[b], manifest.base.scaling)
            self.weights.append(whole)
        self.said.append(f"version {manifest.version} {manifest.base.checkpoint if manifest.base else ''}".strip())
        self.digests.append(manifest.digest)

    def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        self.said.append(f"announced {weights_id.version}")


def _policy(config: TransformerConfig, lora: LoraConfig, mesh: DeviceMesh | None = None) -> ShardedPolicy:
    model = make_model(config)
    init_weights(model, seed=0)
    return ShardedPolicy(model, mesh, lora=lora, seed=3)


def _train(policy: ShardedPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.trained_parameters.values():
            parameter.add_(0.01)


def _go_through(policy: ShardedPolicy, store: Store, ranks: Ranks) -> list[dict[str, Tensor]]:
    """Publish two versions, begin a new stage, and lose the store's content; return the policy's weights each time."""
    publisher, was = Publisher(policy, ranks, store), []
    for stage in ("initial", "sft"):
        weights = policy.full_weights()
        policy.load_full_weights(weights)
        store.base = weights
        if policy.lora.rank:
            publisher.base = BaseCheckpoint(checkpoint=stage, digest="of it", scaling=policy.lora.scaling)
        for version in (1, 2) if stage == "initial" else (3,):
            _train(policy)
            publisher.publish(version, Phase.SFT, 0)
            was.append(policy.full_weights())
    answers = iter(((Next.PUBLISH, 0), (Next.CONTINUE, 7)))
    assert publisher.request_with_republish(lambda: next(answers)) == 7
    was.append(was[-1])
    return was


@pytest.mark.parametrize("lora", [FULL_FINE_TUNING, ADAPTER])
def test_published_weights_equal_the_policy_bit_by_bit(config: TransformerConfig, lora: LoraConfig) -> None:
    store = Store()
    was = _go_through(_policy(config, lora), store, Ranks())
    for published, policy in zip(store.weights, was, strict=True):
        assert published.keys() == policy.keys()
        assert [name for name, tensor in policy.items() if not torch.equal(published[name], tensor)] == []
    assert store.digests[2] == store.digests[3]


def test_an_adapter_is_published_with_the_name_of_its_base(config: TransformerConfig) -> None:
    store = Store()
    _go_through(_policy(config, ADAPTER), store, Ranks())
    first = ["version 1 initial", "announced 1", "version 2 initial", "announced 2"]
    assert store.said == [*first, "version 3 sft", "announced 3", "version 3 sft"]


def test_offers_that_the_store_lost_are_repeated(config: TransformerConfig) -> None:
    store = Store()
    store.forgets = 2
    policy = _policy(config, FULL_FINE_TUNING)
    Publisher(policy, Ranks(), store).publish(1, Phase.SFT, 0)
    assert store.said == ["version 1", "announced 1"]


def test_weights_are_sent_in_the_samplers_precision_under_the_digest_of_the_trained_ones(
    config: TransformerConfig, moe_config: TransformerConfig
) -> None:
    """Parameters that a sampler holds in float32, such as a router's bias, are not cast."""
    for shape in (config, moe_config):
        store, policy = Store(), _policy(shape, FULL_FINE_TUNING)
        _train(policy)
        publisher = Publisher(policy, Ranks(), store, transfer_format=TransferFormat(dtype=torch.bfloat16))
        publisher.publish(1, Phase.SFT, 0)
        held = policy.full_weights()
        assert publisher.digest == make_manifest(1, held).digest
        sampler = make_model(shape).to(torch.bfloat16)
        sampler.load_state_dict(held)
        (sent,) = store.weights
        assert sent.keys() == held.keys()
        for name, tensor in sampler.state_dict().items():
            assert torch.equal(sent[name], tensor), name
        biases = [name for name, tensor in sent.items() if tensor.dtype == torch.float32]
        assert len(biases) == (0 if shape is config else 1), biases


# On two ranks: sharded over both, or a copy on each.
_MESHES = {"shards": 0, "copies": 1}


def _rank(rank: int, directory: Path, config: TransformerConfig) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/port", rank=rank, world_size=2)
    said = {}
    for lora in (FULL_FINE_TUNING, ADAPTER):
        for kind, workers_per_copy in _MESHES.items():
            store = Store()
            _go_through(_policy(config, lora, make_mesh("cpu", workers_per_copy)), store, Ranks())
            said[f"{lora.rank} {kind}"] = store.said, store.digests
    (directory / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def test_two_ranks_publish_the_same_as_one(config: TransformerConfig, tmp_path: Path) -> None:
    run_ranks(_rank, tmp_path, config, num=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for lora in (FULL_FINE_TUNING, ADAPTER):
        store = Store()
        _go_through(_policy(config, lora), store, Ranks())
        for kind in _MESHES:
            assert first.pop(f"{lora.rank} {kind}") == [store.said, store.digests]
            assert second.pop(f"{lora.rank} {kind}") == [[], []]
    assert first == second == {}
