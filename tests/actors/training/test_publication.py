"""What goes to the weight store: every parameter, or under LoRA an adapter on a base that goes once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from actors.messages import Generation, Next
from actors.spec import Phase
from actors.training.publication import Publisher
from actors.weight_store import Manifest
from actors.weights import verify
from learner.model.config import TransformerConfig
from learner.model.lora import merged_weights
from learner.model.lora_config import WHOLE, LoraConfig
from learner.model.transformer import Transformer, init_weights
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy, make_mesh
from tests.ranks import run_ranks

ADAPTER = LoraConfig(rank=4, alpha=8)


class Store:
    """A store and a coordinator that keep what they are given, and may lose it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.weights: list[dict[str, Tensor]] = []
        self.digests: list[str] = []
        self.bases: dict[str, dict[str, Tensor]] = {}

    def publish(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> bool:
        verify(manifest, weights)
        if manifest.base is None:
            self.weights.append(dict(weights))
        elif manifest.base.digest not in self.bases:
            self.said.append(f"{manifest.version} without its base")
            return False
        else:
            base = {name: tensor.float() for name, tensor in self.bases[manifest.base.digest].items()}
            self.weights.append(merged_weights(base, weights, manifest.base.scaling))
        self.said.append(f"version {manifest.version}")
        self.digests.append(manifest.digest)
        return True

    def publish_base(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> None:
        verify(manifest, weights)
        self.said.append("base")
        self.bases[manifest.digest] = dict(weights)

    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None:
        self.said.append(f"announced {generation.version}")


def _policy(config: TransformerConfig, lora: LoraConfig, *, on_ranks: bool = False) -> ShardedPolicy:
    model = Transformer(config)
    init_weights(model, seed=0)
    return ShardedPolicy(model, make_mesh("cpu") if on_ranks else None, lora=lora, seed=3)


def _train(policy: ShardedPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.trained_parameters.values():
            parameter.add_(0.01)


def _go_through(policy: ShardedPolicy, store: Store, ranks: Ranks) -> list[dict[str, Tensor]]:
    """Two versions, a stage that begins anew, and a store that loses what it has; what the policy was each time."""
    publisher, was = Publisher(policy, ranks, store), []
    for version in (1, 2):
        _train(policy)
        publisher.publish(version, Phase.SFT, 0)
        was.append(policy.full_weights())
    policy.load_full_weights(policy.full_weights())
    _train(policy)
    publisher.publish(3, Phase.RL, 1)
    was.append(policy.full_weights())
    store.bases.clear()
    answers = iter(((Next.PUBLISH, 0), (Next.GO_ON, 7)))
    assert publisher.answered(lambda: next(answers)) == 7
    was.append(was[-1])
    return was


@pytest.mark.parametrize("lora", [WHOLE, ADAPTER])
def test_what_is_published_is_the_policy_to_the_bit(config: TransformerConfig, lora: LoraConfig) -> None:
    store = Store()
    was = _go_through(_policy(config, lora), store, Ranks())
    for published, policy in zip(store.weights, was, strict=True):
        assert published.keys() == policy.keys()
        assert [name for name, tensor in policy.items() if not torch.equal(published[name], tensor)] == []
    assert store.digests[2] == store.digests[3]


def test_a_base_goes_once_for_each_stage_and_again_where_it_was_lost(config: TransformerConfig) -> None:
    store = Store()
    _go_through(_policy(config, ADAPTER), store, Ranks())
    first = ["base", "version 1", "announced 1", "version 2", "announced 2"]
    assert store.said == [
        *first,
        *("base", "version 3", "announced 3"),
        *("3 without its base", "base", "version 3"),
    ]


def _rank(rank: int, directory: Path, config: TransformerConfig) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/port", rank=rank, world_size=2)
    store = Store()
    _go_through(_policy(config, ADAPTER, on_ranks=True), store, Ranks())
    (directory / f"{rank}.json").write_text(json.dumps([store.said, store.digests]))
    dist.destroy_process_group()


def test_of_two_ranks_the_first_publishes_what_one_would(config: TransformerConfig, tmp_path: Path) -> None:
    store = Store()
    _go_through(_policy(config, ADAPTER), store, Ranks())
    run_ranks(_rank, tmp_path, config, num=2)
    assert json.loads((tmp_path / "0.json").read_text()) == [store.said, store.digests]
    assert json.loads((tmp_path / "1.json").read_text()) == [[], []]
