"""A sampler that sleeps between its turns holds nothing on its GPU, and samples what one that never sleeps does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.messages import Generation, Portion
from actors.plan import RunPlan
from actors.sampler import SamplerWorker
from actors.spec import RunSpec
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.request import Cache
from tests.actors.test_fetching import Shelf
from tests.stand_in_gpu import bytes_there, stand_in_gpu

LAYER = "blocks.1.mlp.down_proj"


@pytest.fixture(params=["whole", "adapter"])
def generations(request: pytest.FixtureRequest, spec: RunSpec) -> tuple[Shelf, list[Generation]]:
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


def _sampled(worker: SamplerWorker, generation: Generation, portion: Portion) -> list[Any]:
    completions, count = worker.generate(generation, portion)
    assert count == len(portion.requests)
    assert {each.policy_version for each in completions} == {generation.version}
    return [(each.token_ids.tolist(), each.commit_logp.tolist()) for each in completions]


def test_a_sampler_that_sleeps_holds_nothing_and_samples_the_same(
    spec: RunSpec, plan: RunPlan, generations: tuple[Shelf, list[Generation]]
) -> None:
    shelf, (first, second) = generations
    portion, engine = plan.round_portion(0, 0), spec.rollout.engine
    with stand_in_gpu():
        before = bytes_there()
        worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cuda", engine, gpu_share=0.3, is_asleep=True)
        assert bytes_there() == before, "it begins asleep"
        found = []
        for generation in (first, second, second):
            found.append(_sampled(worker, generation, portion))
            assert bytes_there() > before
            worker.sleep()
            assert bytes_there() == before
        awake = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cuda", engine, gpu_share=0.3)
        assert bytes_there() > before
        expected = [_sampled(awake, generation, portion) for generation in (first, second)]
        assert found == [*expected, expected[1]]
        assert expected[0] != expected[1]


def test_a_compiled_sampler_that_sleeps_gives_back_what_its_rows_are_remembered_in(
    spec: RunSpec, plan: RunPlan, generations: tuple[Shelf, list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, made = generations
    monkeypatch.setattr("rollout.sampler._compiled", lambda model: model)
    portion = plan.round_portion(0, 0)
    cached = tuple(
        replace(request, params=request.params.model_copy(update={"cache": Cache.DUAL})) for request in portion.requests
    )
    portion = replace(portion, requests=cached)
    with stand_in_gpu():
        before = bytes_there()
        worker = SamplerWorker(
            spec.initial_checkpoint, lambda: shelf, "cuda", EngineConfig(compile=True), is_asleep=True
        )
        found = []
        for generation in made:
            found.append(_sampled(worker, generation, portion))
            assert _sampled(worker, generation, portion) == found[-1]
            worker.sleep()
            assert bytes_there() == before
        assert found[0] != found[1]


def test_a_compiled_sampler_answers_long_prompts_without_compiling_their_lengths(
    spec: RunSpec, plan: RunPlan, generations: tuple[Shelf, list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, (first, _) = generations
    compiled: list[int] = []

    def compiling(model: Transformer) -> Callable[..., torch.Tensor]:
        def forward(ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            compiled.append(ids.shape[1])
            return model(ids, *arguments, **options)

        return forward

    monkeypatch.setattr("rollout.sampler._compiled", compiling)
    worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", EngineConfig(compile=True))
    portion = plan.round_portion(0, 0)
    expected = _sampled(worker, first, portion)
    num_compiled = len(compiled)
    assert num_compiled > 0
    assert [ids for ids, _ in _sampled(worker, first, replace(portion, is_long=True))] == [ids for ids, _ in expected]
    assert len(compiled) == num_compiled
    assert _sampled(worker, first, portion) == expected
    assert len(compiled) > num_compiled


def test_weights_that_were_staged_are_sampled_from_as_if_they_had_been_fetched(
    spec: RunSpec, plan: RunPlan, generations: tuple[Shelf, list[Generation]]
) -> None:
    shelf, (first, second) = generations
    portion, engine = plan.round_portion(0, 0), spec.rollout.engine
    expected = [
        _sampled(SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", engine), one, portion)
        for one in (first, second)
    ]
    worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", engine)
    worker.stage(first)
    found = [_sampled(worker, first, portion)]
    worker.stage(first)
    worker.stage(second)
    # A portion that is tried again is of its own version, whatever comes next.
    assert _sampled(worker, first, portion) == expected[0]
    found.append(_sampled(worker, second, portion))
    assert found == expected
    assert expected[0] != expected[1]


def test_what_is_being_fetched_as_it_is_asked_for_is_not_staged_beside_that(
    spec: RunSpec, plan: RunPlan, generations: tuple[Shelf, list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, (first, _) = generations
    worker = SamplerWorker(spec.initial_checkpoint, lambda: shelf, "cpu", spec.rollout.engine)
    asked, version = [], shelf.version

    def fetch(number: int, digest: str | None = None) -> Any:
        asked.append(number)
        worker.stage(first)
        return version(number, digest)

    monkeypatch.setattr(shelf, "version", fetch)
    worker.generate(first, plan.round_portion(0, 0))
    worker.stage(first)
    assert asked == [0]
