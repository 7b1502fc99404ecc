"""A sampler offloaded between its turns holds no GPU memory, and samples the same as one that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.messages import WeightsId, WorkUnit
from actors.plan import RunPlan
from actors.sampler import SamplerWorker
from actors.spec import RunSpec
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.request import Cache
from tests.actors.test_fetching import Shelf
from tests.simulated.stand_in_gpu import bytes_there, stand_in_gpu

LAYER = "blocks.1.mlp.down_proj"


@pytest.fixture(params=["whole", "adapter"])
def weights_ids(request: pytest.FixtureRequest, spec: RunSpec) -> tuple[Shelf, list[WeightsId]]:
    """A store with two versions."""
    shelf, made = Shelf(), []
    base = {name: tensor.detach() for name, tensor in load_policy(spec.initial_checkpoint).state_dict().items()}
    for version in (0, 1):
        generator = torch.Generator().manual_seed(version)
        shapes = {name: tensor.shape for name, tensor in base.items()}
        if request.param == "adapter":
            outputs, inputs = base[f"{LAYER}.weight"].shape
            shapes = {f"{LAYER}.lora_A.weight": (4, inputs), f"{LAYER}.lora_B.weight": (outputs, 4)}
        weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        on = None
        if request.param == "adapter":
            on = BaseCheckpoint(checkpoint="initial", digest=chain_digest(spec.initial_checkpoint), scaling=0.37)
        made.append(shelf.put(version, weights, on))
    return shelf, made


def _sampled(worker: SamplerWorker, weights_id: WeightsId, work_unit: WorkUnit) -> list[Any]:
    completions, count = worker.generate(weights_id, work_unit)
    assert count == len(work_unit.requests)
    assert {each.policy_version for each in completions} == {weights_id.version}
    return [(each.token_ids.tolist(), each.commit_logp.tolist()) for each in completions]


def test_an_offloaded_sampler_holds_no_memory_and_samples_the_same(
    spec: RunSpec, plan: RunPlan, weights_ids: tuple[Shelf, list[WeightsId]]
) -> None:
    shelf, (first, second) = weights_ids
    work_unit, engine = plan.round_work_unit(0, 0), spec.rollout.engine
    with stand_in_gpu():
        before = bytes_there()
        worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cuda", engine, gpu_share=0.3, is_offloaded=True)
        assert bytes_there() == before, "it begins asleep"
        found = []
        for weights_id in (first, second, second):
            found.append(_sampled(worker, weights_id, work_unit))
            assert bytes_there() > before
            worker.offload()
            assert bytes_there() == before
        awake = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cuda", engine, gpu_share=0.3)
        assert bytes_there() > before
        expected = [_sampled(awake, weights_id, work_unit) for weights_id in (first, second)]
        assert found == [*expected, expected[1]]
        assert expected[0] != expected[1]


def test_an_offloaded_compiled_sampler_frees_its_kv_cache(
    spec: RunSpec, plan: RunPlan, weights_ids: tuple[Shelf, list[WeightsId]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, made = weights_ids
    monkeypatch.setattr("rollout.sampler._compiled", lambda model: model)
    work_unit = plan.round_work_unit(0, 0)
    cached = tuple(
        replace(request, params=request.params.model_copy(update={"cache": Cache.DUAL}))
        for request in work_unit.requests
    )
    work_unit = replace(work_unit, requests=cached)
    with stand_in_gpu():
        before = bytes_there()
        worker = SamplerWorker(
            spec.initial_checkpoint, lambda: shelf, "cuda", EngineConfig(compile=True), is_offloaded=True
        )
        found = []
        for weights_id in made:
            found.append(_sampled(worker, weights_id, work_unit))
            assert _sampled(worker, weights_id, work_unit) == found[-1]
            worker.offload()
            assert bytes_there() == before
        assert found[0] != found[1]


def test_long_prompts_are_sampled_eagerly_by_a_compiled_sampler(
    spec: RunSpec, plan: RunPlan, weights_ids: tuple[Shelf, list[WeightsId]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, (first, _) = weights_ids
    compiled: list[int] = []

    def compiling(model: Transformer) -> Callable[..., torch.Tensor]:
        def forward(ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            compiled.append(ids.shape[1])
            return model(ids, *arguments, **options)

        return forward

    monkeypatch.setattr("rollout.sampler._compiled", compiling)
    worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", EngineConfig(compile=True))
    work_unit = plan.round_work_unit(0, 0)
    expected = _sampled(worker, first, work_unit)
    num_compiled = len(compiled)
    assert num_compiled > 0
    assert [ids for ids, _ in _sampled(worker, first, replace(work_unit, is_long=True))] == [ids for ids, _ in expected]
    assert len(compiled) == num_compiled
    assert _sampled(worker, first, work_unit) == expected
    assert len(compiled) > num_compiled


def test_prefetched_weights_sample_like_fetched_ones(
    spec: RunSpec, plan: RunPlan, weights_ids: tuple[Shelf, list[WeightsId]]
) -> None:
    shelf, (first, second) = weights_ids
    work_unit, engine = plan.round_work_unit(0, 0), spec.rollout.engine
    expected = [
        _sampled(SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", engine), one, work_unit)
        for one in (first, second)
    ]
    worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", engine)
    worker.prefetch(first)
    found = [_sampled(worker, first, work_unit)]
    worker.prefetch(first)
    worker.prefetch(second)
    # A retried work unit uses its own version, whatever was prefetched.
    assert _sampled(worker, first, work_unit) == expected[0]
    found.append(_sampled(worker, second, work_unit))
    assert found == expected
    assert expected[0] != expected[1]


def test_a_version_being_fetched_is_not_prefetched_again(
    spec: RunSpec, plan: RunPlan, weights_ids: tuple[Shelf, list[WeightsId]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, (first, _) = weights_ids
    worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", spec.rollout.engine)
    asked, version = [], shelf.version

    def fetch(number: int, digest: str | None = None) -> Any:
        asked.append(number)
        worker.prefetch(first)
        return version(number, digest)

    monkeypatch.setattr(shelf, "version", fetch)
    worker.generate(first, plan.round_work_unit(0, 0))
    worker.prefetch(first)
    assert asked == [0]
