"""Weights and work units between real Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.cluster import watched
from actors.coordination.liveness import LivenessMonitor, ready
from actors.coordination.pools import Pools, WorkUnitFailedError
from actors.grader import GraderWorker
from actors.messages import WeightsId
from actors.plan import RunPlan
from actors.resources import OBJECT_STORE
from actors.sampler import SamplerWorker, read_from
from actors.spec import RunSpec
from actors.training.run_client import RunClient
from actors.weights.fetching import StoreReader
from actors.weights.store import WeightStore
from actors.weights.tensors import make_manifest, put
from benchmarks.weights import publishing
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest
from learner.model.lora import set_adapter
from rollout.sampler import Sampler
from tests.actors.direct_transport import register
from tests.actors.gathering import NUM_GATHERS, gather_and_put
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def _sampler(spec: RunSpec, store: Any) -> Any:
    worker = watched(SamplerWorker).options(num_cpus=0)
    return worker.remote(spec.initial_checkpoint, read_from(store), "cpu", spec.rollout.engine)


def _weights(spec: RunSpec, scale: float) -> dict[str, torch.Tensor]:
    return {name: tensor * scale for name, tensor in load_policy(spec.initial_checkpoint).state_dict().items()}


def _publish(store: Any, version: int, weights: dict[str, torch.Tensor]) -> None:
    ray.get(store.publish.remote(make_manifest(version, weights), put(weights)), timeout=180)


def _fetched(store: Any, version: int, digest: str | None = None) -> dict[str, torch.Tensor]:
    return dict(StoreReader(store, 30).version(version, digest)[1])


def _weights_id(spec: RunSpec, version: int, scale: float = 1.0) -> WeightsId:
    return WeightsId(version=version, digest=make_manifest(version, _weights(spec, scale)).digest)


def _fetch_until_it_fails(store: Any) -> None:
    """Ray kills in the background, so that a store may still answer for a moment."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        _fetched(store, 1)


def _new_store() -> Any:
    return ray.remote(WeightStore).options(num_cpus=0).remote(2)


@pytest.fixture
def store() -> Any:
    """A store that a test may kill."""
    return _new_store()


@pytest.fixture(scope="module")
def shared_store(cluster: dict[str, str]) -> Any:
    """A store shared by several tests, since a process takes seconds to start. Publishing version 1 again drops what an
    earlier test has published."""
    return _new_store()


@pytest.fixture(scope="module")
def shared_sampler(spec: RunSpec, shared_store: Any) -> Any:
    """A sampler that reads from the shared store."""
    return _sampler(spec, shared_store)


def test_a_sampler_computes_with_the_published_weights(
    shared_store: Any, shared_sampler: Any, spec: RunSpec, plan: RunPlan
) -> None:
    """The log-probabilities verify the transfer, since each version is another policy."""
    work_unit = plan.round_work_unit(0, 0)
    said = []
    for version, scale in ((1, 1.0), (2, 1.3)):
        _publish(shared_store, version, _weights(spec, scale))
        completions, count = ray.get(
            shared_sampler.generate.remote(_weights_id(spec, version, scale), work_unit), timeout=180
        )
        local = load_policy(spec.initial_checkpoint)
        local.load_state_dict(_weights(spec, scale))
        expected = Sampler(local, version).generate(work_unit.requests)
        assert count == len(expected) == 8
        for ours, theirs in zip(completions, expected, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert ours.commit_logp == pytest.approx(theirs.commit_logp, abs=1e-6)
            assert ours.policy_version == version
        said.append([completion.commit_logp.tolist() for completion in completions])
    assert said[0] != said[1]


def test_damaged_weights_are_refused(shared_store: Any, shared_sampler: Any, spec: RunSpec, plan: RunPlan) -> None:
    weights = _weights(spec, 1.1)
    manifest = make_manifest(1, weights)
    weights["norm.weight"][3] += 1e-3
    ray.get(shared_store.publish.remote(manifest, put(weights)), timeout=180)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"arrived damaged: tensor norm\.weight differs"):
            ray.get(shared_sampler.generate.remote(_weights_id(spec, 1, 1.1), plan.round_work_unit(0, 0)), timeout=180)


def test_weights_with_another_digest_are_not_fetched(shared_store: Any, spec: RunSpec) -> None:
    _publish(shared_store, 1, _weights(spec, 1.0))
    digest = make_manifest(1, _weights(spec, 1.0)).digest
    assert _fetched(shared_store, 1, digest).keys() == _weights(spec, 1.0).keys()
    with pytest.raises(ValueError, match=f"checksum is {digest[:12]}, and that was dead"):
        _fetched(shared_store, 1, "dead" * 16)


def test_the_store_keeps_the_newest_versions_and_drops_abandoned_ones(shared_store: Any, spec: RunSpec) -> None:
    for version in (1, 2, 3):
        _publish(shared_store, version, _weights(spec, 1.0))
    assert _fetched(shared_store, 2).keys() == _weights(spec, 1.0).keys()
    with pytest.raises(LookupError, match=r"policy version 1 is not in the store; it has \[2, 3\]"):
        _fetched(shared_store, 1)
    _publish(shared_store, 2, _weights(spec, 2.0))
    assert torch.equal(_fetched(shared_store, 2)["norm.weight"], _weights(spec, 2.0)["norm.weight"])
    with pytest.raises(LookupError):
        _fetched(shared_store, 3)


def test_a_republished_version_is_fetched_again(
    shared_store: Any, shared_sampler: Any, spec: RunSpec, plan: RunPlan
) -> None:
    work_unit, said = plan.round_work_unit(0, 0), []
    for scale in (1.0, 1.3):
        _publish(shared_store, 5, _weights(spec, scale))
        completions, _ = ray.get(shared_sampler.generate.remote(_weights_id(spec, 5, scale), work_unit), timeout=180)
        said.append([completion.commit_logp.tolist() for completion in completions])
    assert said[0] != said[1]


def _adapter_on(base: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    name = "blocks.0.attn.q_proj"
    outputs, inputs = base[f"{name}.weight"].shape
    return {
        f"{name}.lora_A.weight": torch.full((2, inputs), value),
        f"{name}.lora_B.weight": torch.ones(outputs, 2),
    }


def test_a_sampler_computes_with_a_published_adapter(
    shared_store: Any, shared_sampler: Any, spec: RunSpec, plan: RunPlan
) -> None:
    base = BaseCheckpoint(checkpoint="initial", digest=chain_digest(spec.initial_checkpoint), scaling=0.5)
    work_unit = plan.round_work_unit(0, 0)
    for version in (1, 2):
        adapter = _adapter_on(_weights(spec, 1.0), 0.01 * version)
        manifest = make_manifest(version, adapter, base)
        ray.get(shared_store.publish.remote(manifest, put(adapter)), timeout=180)
        local = load_policy(spec.initial_checkpoint)
        set_adapter(local, adapter, 0.5)
        weights_id = WeightsId(version=version, digest=manifest.digest)
        completions, _ = ray.get(shared_sampler.generate.remote(weights_id, work_unit), timeout=180)
        for ours, theirs in zip(completions, Sampler(local, version).generate(work_unit.requests), strict=True):
            assert ours.commit_logp.tolist() == theirs.commit_logp.tolist(), "to the bit"


def _kill(actor: Any) -> None:
    """Kill an actor and wait until it is dead: `ray.kill` returns earlier."""
    ray.kill(actor)
    while _is_alive(actor):
        pass


def _is_alive(actor: Any) -> bool:
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        return False
    return True


class _Rank:
    """A learner's rank. Its training waits in a thread meanwhile, as under Ray Train."""

    def __init__(self, store: Any, transport: str = OBJECT_STORE) -> None:
        if transport != OBJECT_STORE:
            register(transport)
        self._client = RunClient(None, store, transport)

    def offer(self, key: str, rank: int, shards: dict[str, torch.Tensor]) -> None:
        self._client.offer(key, rank, shards)

    def withdraw(self) -> None:
        self._client.withdraw()


def test_the_store_takes_offered_rows_and_keeps_them_after_the_ranks_die(
    shared_store: Any, spec: RunSpec, plan: RunPlan
) -> None:
    weights, store = _weights(spec, 1.0), shared_store
    halves = [{name: tensor.tensor_split(2)[rank] for name, tensor in weights.items()} for rank in range(2)]
    manifest = make_manifest(1, weights)
    ranks = [ray.remote(_Rank).options(num_cpus=0).remote(store) for _ in range(2)]
    offers = [
        rank.offer.remote("key", index, half) for index, (rank, half) in enumerate(zip(ranks, halves, strict=True))
    ]
    ray.get(offers[0], timeout=180)
    assert not ray.get(store.take.remote(manifest, "other key", 1), timeout=60)
    ray.get(offers, timeout=180)
    assert not ray.get(store.take.remote(manifest, "key", 3), timeout=60), "a third has offered nothing"
    assert ray.get(store.take.remote(manifest, "key", 2), timeout=60)
    ray.get([rank.withdraw.remote() for rank in ranks], timeout=60)
    ray.get(store.record_offer.remote("late", 0, ranks[0]), timeout=60)
    with pytest.raises(LookupError, match="this rank does not offer late"):
        ray.get(store.take.remote(manifest, "late", 1), timeout=60)
    ray.get(store.record_offer.remote("dead", 0, ranks[0]), timeout=60)
    for rank in ranks:
        _kill(rank)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(store.take.remote(manifest, "dead", 1), timeout=60)
    fetched = StoreReader(store, 30).version(1, manifest.digest)[1]
    assert all(torch.equal(fetched[name], tensor) for name, tensor in weights.items())
    assert len(fetched.pieces("norm.weight")) == 2
    work_unit = plan.round_work_unit(0, 0)
    # The shared sampler has had an adapter, which full weights do not remove.
    sampler = _sampler(spec, store)
    completions, _ = ray.get(sampler.generate.remote(_weights_id(spec, 1), work_unit), timeout=180)
    local = Sampler(load_policy(spec.initial_checkpoint), 1).generate(work_unit.requests)
    assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in local]


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_large_version_travels_in_pieces(shared_store: Any, is_offered: bool) -> None:
    store = shared_store
    weights = {name: torch.full((1000, 1000), float(ord(name))) for name in "abcdefg"}
    manifest = make_manifest(1, weights)
    if is_offered:
        rank = ray.remote(_Rank).options(num_cpus=0).remote(store)
        ray.get(rank.offer.remote("pieces", 0, weights), timeout=180)
        assert ray.get(store.take.remote(manifest, "pieces", 1), timeout=60)
        _kill(rank)
    else:
        ray.get(store.publish.remote(manifest, put(weights)), timeout=180)
    _, pieces = ray.get(store.get.remote(1), timeout=60)
    assert len(pieces) == 3, "of 8 MB or more"
    fetched = StoreReader(store, 30).version(1, manifest.digest)[1]
    assert all(torch.equal(fetched[name], tensor) for name, tensor in weights.items())


class _DirectSampler(SamplerWorker):
    """A sampler that registers the transport in its process: Ray knows only NIXL and CUDA IPC by itself."""

    def __init__(self, spec: RunSpec, store: Any, transport: str) -> None:
        register(transport)
        super().__init__(spec.initial_checkpoint, read_from(store), "cpu", spec.rollout.engine)


@pytest.mark.nightly
def test_direct_transport_fetches_from_ranks_and_fails_after_a_rank_dies(
    store: Any, spec: RunSpec, plan: RunPlan
) -> None:
    weights, transport = _weights(spec, 1.3), "files"
    halves = [{name: tensor.tensor_split(2)[rank] for name, tensor in weights.items()} for rank in range(2)]
    ranks = [ray.remote(_Rank).options(num_cpus=0).remote(store, transport) for _ in range(2)]
    for index, (rank, half) in enumerate(zip(ranks, halves, strict=True)):
        ray.get(rank.offer.remote("key", index, half), timeout=180)
    assert ray.get(store.take.remote(make_manifest(1, weights), "key", 2), timeout=60)
    sampler = watched(_DirectSampler).options(num_cpus=0).remote(spec, store, transport)
    work_unit, policy = plan.round_work_unit(0, 0), load_policy(spec.initial_checkpoint)
    policy.load_state_dict(weights)
    completions, _ = ray.get(sampler.generate.remote(_weights_id(spec, 1, 1.3), work_unit), timeout=180)
    local = Sampler(policy, 1).generate(work_unit.requests)
    for ours, theirs in zip(completions, local, strict=True):
        assert ours.commit_logp == pytest.approx(theirs.commit_logp, abs=1e-6)
    ray.kill(ranks[1])
    other = watched(_DirectSampler).options(num_cpus=0).remote(spec, store, transport)
    with pytest.raises(LookupError, match="the owner of its weights is gone, and policy version 1 with it"):
        ray.get(other.generate.remote(_weights_id(spec, 1, 1.3), work_unit), timeout=180)


@pytest.mark.nightly
def test_the_weight_benchmark_counts_transferred_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_D_MODEL", 64)
    monkeypatch.setattr(publishing, "_VOCABULARY", 64)
    *whole, adapter = publishing.measured(0.0, 1, rank=1, rounds=1)
    assert [(row.form, row.share) for row in whole] == [("gathered", 1.0), ("shards", 1.0), ("shards, bfloat16", 0.5)]
    # 64 x 64 has two rows of 64, and 64 x 192 one of each.
    layer = 4 * 2 * 64 + 3 * (64 + 192)
    assert adapter.megabytes == 4 * layer / 1e6
    assert adapter.share < 0.05


def test_a_dead_store_raises_a_clear_error(store: Any, spec: RunSpec) -> None:
    _publish(store, 1, _weights(spec, 1.0))
    ray.kill(store)
    with pytest.raises(LookupError, match="the weight store or the owner of its weights is gone"):
        _fetch_until_it_fails(store)


class _Moody(SamplerWorker):
    """A sampler whose first processes misbehave in given ways; a file counts those that have."""

    def __init__(self, spec: RunSpec, store: Any, mark: Path, *moods: str) -> None:
        super().__init__(spec.initial_checkpoint, read_from(store), "cpu", spec.rollout.engine)
        self._mark, self._moods = mark, moods

    def generate(self, weights_id: Any, work_unit: Any) -> Any:
        num_before = len(self._mark.read_text()) if self._mark.exists() else 0
        if num_before < len(self._moods):
            self._mark.write_text("." * (num_before + 1))
            if self._moods[num_before] == "hangs":
                time.sleep(600)
            os._exit(1)
        return super().generate(weights_id, work_unit)


def test_a_dead_or_hung_sampler_is_restarted_and_samples_the_same(
    store: Any, spec: RunSpec, plan: RunPlan, tmp_path: Path
) -> None:
    _publish(store, 1, _weights(spec, 1.0))
    options = {"num_cpus": 0, "max_restarts": -1}
    moody = watched(_Moody).options(**options).remote(spec, store, tmp_path / "mark", "dies", "hangs")
    grader = watched(GraderWorker).options(num_cpus=0).remote(spec.task, spec.reward, spec.initial_checkpoint)
    ray.get([moody.ready.remote(), grader.ready.remote()], timeout=180)
    work_unit = plan.round_work_unit(0, 0)

    async def tries() -> tuple[list[str], Any]:
        pools, said = Pools({"sampler 0": moody}, {"grader 0": grader}, 60.0, 60.0, on_pause=print), []
        for timeout_s in (60.0, 4.0):
            pools._samplers.timeout_s = timeout_s
            with pytest.raises(WorkUnitFailedError) as failure:
                await pools.score(_weights_id(spec, 1), work_unit.key, lambda: work_unit, 0)
            said.append(str(failure.value))
        pools._samplers.timeout_s = 60.0
        # Each retry begins once the actor is back, since it is not free earlier.
        return said, await pools.score(_weights_id(spec, 1), work_unit.key, lambda: work_unit, 0)

    (of_death, of_silence), (reference, summary) = _run(tries())
    assert of_death.startswith("a sampler failed")
    assert of_silence.startswith("a sampler did not answer within 4 s and was restarted")
    scored = ray.get(reference, timeout=180)
    local = Sampler(load_policy(spec.initial_checkpoint), 1).generate(work_unit.requests)
    assert [c.token_ids.tolist() for c in scored.completions] == [c.token_ids.tolist() for c in local]
    assert len(summary.texts) == 8


@pytest.mark.nightly
def test_a_sampler_still_busy_at_the_end_of_its_turn_is_restarted(
    store: Any, spec: RunSpec, plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.coordination.pool._RELEASE_TIMEOUT_S", 60.0)
    _publish(store, 1, _weights(spec, 1.0))
    moody = watched(_Moody).options(num_cpus=0, max_restarts=-1).remote(spec, store, tmp_path / "mark", "hangs")
    work_unit = plan.round_work_unit(0, 0)
    local = [
        c.token_ids.tolist() for c in Sampler(load_policy(spec.initial_checkpoint), 1).generate(work_unit.requests)
    ]

    def sampled() -> Any:
        return moody.generate.remote(_weights_id(spec, 1), work_unit)

    async def turns() -> None:
        pools = Pools({"sampler 0": moody}, {}, 60.0, 60.0, on_pause=print)
        hung = sampled()
        while not (tmp_path / "mark").exists():
            await asyncio.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr("actors.coordination.pool._RELEASE_TIMEOUT_S", 2.0)
            assert await pools.end_turn() == ["sampler 0 did not free its GPU at the end of its turn and was restarted"]
        with pytest.raises(ray.exceptions.RayActorError):
            await hung
        for _ in range(2):
            completions, _ = await sampled()
            assert [c.token_ids.tolist() for c in completions] == local
            assert await pools.end_turn() == []

    _run(turns())


@pytest.mark.nightly
def test_a_stopped_process_is_detected_and_replaced(store: Any, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process neither answers nor exits, so that only the watch can detect it."""
    monkeypatch.setattr("actors.coordination.liveness.PROBE_EVERY_S", 0.2)
    monkeypatch.setattr("actors.coordination.liveness.SILENT_S", 2.0)
    sampler = watched(SamplerWorker).options(num_cpus=0, max_restarts=-1)
    sampler = sampler.remote(spec.initial_checkpoint, read_from(store), "cpu", spec.rollout.engine)
    first = ray.get(sampler.ready.remote(), timeout=180)
    hung: list[str] = []
    answered: list[int | None] = []

    def end(name: str, actor: Any, seconds: float) -> None:
        hung.append(name)
        ray.kill(actor, no_restart=False)

    async def probe(actor: Any) -> int | None:
        answered.append(await ready(actor))
        return answered[-1]

    async def until(watch: LivenessMonitor, condition: Callable[[], bool]) -> None:
        while not condition():
            watch.sweep()
            await asyncio.sleep(0.05)

    async def scene() -> None:
        watch = LivenessMonitor(end)
        watch.probe("sampler 0", sampler, probe, hung_s=4.0)
        await until(watch, lambda: bool(answered))
        os.kill(first, signal.SIGSTOP)
        await until(watch, lambda: "sampler 0" in watch.silent())
        await until(watch, lambda: bool(watch.num_restarts()))

    _run(scene())
    assert hung == ["sampler 0"]
    assert ray.get(sampler.ready.remote(), timeout=180) != first


def test_an_invalid_request_fails_with_its_reason(
    shared_store: Any, shared_sampler: Any, spec: RunSpec, plan: RunPlan
) -> None:
    _publish(shared_store, 1, _weights(spec, 1.0))
    work_unit = plan.round_work_unit(0, 0)
    long = replace(work_unit, requests=tuple(replace(r, prompt_ids=(5,) * 60) for r in work_unit.requests))

    async def once() -> None:
        await Pools({"sampler 0": shared_sampler}, {}, 60.0, 60.0, on_pause=print).score(
            _weights_id(spec, 1), long.key, lambda: long, 0
        )

    with pytest.raises(WorkUnitFailedError, match="make 68 tokens; the policy takes at most 32"):
        _run(once())


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


@pytest.mark.nightly
@pytest.mark.timeout(600 + NUM_GATHERS)
def test_gathered_weights_equal_the_loaded_ones(cluster: dict[str, str], tmp_path: Path) -> None:
    run_ranks(gather_and_put, NUM_GATHERS, tmp_path / "meeting", cluster["RAY_ADDRESS"], num=2)
