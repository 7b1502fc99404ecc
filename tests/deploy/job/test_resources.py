"""Resource requests: the actors and the preflight use the same numbers."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from actors.resources import GpuSection, grader_resources, learner_resources, num_gpus_for, sampler_resources
from deploy.capacity.needs import needs_of
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe
from deploy.service.on_ray import given_device
from learner.hardware import limit_memory
from tests.simulated.stand_in_gpu import stand_in_gpu


def test_two_cores_place_the_default_pools(recipe_file: Path) -> None:
    needs = needs_of(load_recipe(recipe_file, []))
    assert needs.cpus == pytest.approx(1.9)
    assert needs.gpus == 0


def test_on_cuda_every_sampler_and_learner_worker_has_a_gpu(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["device=cuda", "rollout.num_samplers=3"])
    assert needs_of(recipe).gpus == 5
    assert sampler_resources("cuda")["num_gpus"] == learner_resources("cuda")["GPU"] == 1
    assert "GPU" not in learner_resources("cpu")


@pytest.mark.parametrize(
    ("shares", "num_gpus"),
    [
        ([], 0),
        ([1, 1], 2),
        ([0.4, 0.6], 1),
        ([0.6, 0.6], 2),
        ([0.1] * 10, 1),
        ([0.6, 0.5, 0.4, 0.5], 2),
        ([0.7, 0.4], 2),
    ],
)
def test_shares_are_placed_where_there_is_room(shares: list[float], num_gpus: int) -> None:
    assert num_gpus_for(shares) == num_gpus


def test_one_gpu_has_a_sampler_a_learner_and_an_engine(recipe_file: Path) -> None:
    one = ("device=cuda", "rollout.num_samplers=1", "learner.num_workers=1")
    shared = "gpus={sampler: 0.3, learner: 0.5, engine: 0.2}"
    recipe = load_recipe(recipe_file, [*one, shared])
    assert needs_of(recipe, serve=True).gpus == needs_of(recipe).gpus == 1
    assert needs_of(load_recipe(recipe_file, [*one, "gpus={sampler: 0.3, learner: 0.7, engine: 0.2}"])).gpus == 1
    assert needs_of(load_recipe(recipe_file, [*one, "gpus.learner=0.7", "gpus.engine=0.4"]), serve=True).gpus == 3
    assert sampler_resources("cuda", recipe.gpus.sampler) == {"num_cpus": 1, "num_gpus": 0.3}
    assert learner_resources("cuda", recipe.gpus.learner) == {"CPU": 1, "GPU": 0.5}


def test_the_recipe_of_llada_says_how_one_gpu_has_all_of_it() -> None:
    path = Path(__file__).parents[3] / "recipes" / "llada-gsm8k.yaml"
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("# One GPU of 140 GB")]
    overrides = shlex.split(line.partition(": ")[2].rstrip("."))
    assert (needs_of(load_recipe(path, [])).gpus, needs_of(load_recipe(path, overrides)).gpus) == (8, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ((), r"rollout\.num_samplers is 2, learner\.num_workers 1; take the same number"),
        (
            ("rollout.num_samplers=1", "learner.max_staleness=1"),
            r"learner\.max_staleness 1 lets them sample meanwhile; take learner\.max_staleness=0 or gpus\.col",
        ),
    ],
)
def test_colocation_that_cannot_work_is_refused(recipe_file: Path, changes: tuple[str, ...], why: str) -> None:
    exact = (
        "learner.estimator={name: trajectory, steps_per_segment: 1, law: sampler}",
        "learner.objective={name: clipped_ratio, old: sampler}",
    )
    given = ("device=cuda", "learner.num_workers=1", "gpus.colocate=true", *exact, *changes)
    with pytest.raises(UserError, match=why):
        load_recipe(recipe_file, given)


def test_shares_that_could_put_two_ranks_on_one_gpu_are_refused(recipe_file: Path) -> None:
    with pytest.raises(UserError, match=r"gpus\.learner 0\.5 is a share for one worker, and learner\.num_workers is 2"):
        load_recipe(recipe_file, ["device=cuda", "learner.num_workers=2", "gpus.learner=0.5"])


@pytest.mark.parametrize("whole", [1.0, 0.8])
def test_colocation_places_one_sampler_and_one_rank_per_gpu(whole: float) -> None:
    """In Ray's placement order, which is samplers first."""
    gpus = GpuSection(colocate=True, sampler=whole, learner=whole / 2)
    sampler, learner = gpus.sampler_request, gpus.learner_request
    assert sampler + learner == pytest.approx(whole)
    left = whole - sampler
    assert learner <= left + 1e-9 < 2 * learner, "room for one learner worker and a sampler"
    if whole == 1:
        assert 2 * sampler > 1, "and for no second sampler"
        assert num_gpus_for([sampler, learner] * 4) == 4


def test_no_process_takes_more_of_a_gpu_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    gpu = torch.device("cuda", 0)
    for device, share in ((gpu, 0.3), (gpu, 1.0), (torch.device("cpu"), 0.3)):
        limit_memory(device, share)
    assert limits == [(0.3, gpu)]


@pytest.mark.parametrize(("given", "device"), [({}, "cpu"), ({"GPU": []}, "cpu"), ({"GPU": ["1"]}, "cuda:0")])
def test_an_engine_takes_no_gpu_that_ray_has_not_given_it(
    given: dict[str, list[str]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does not hide other actors' GPUs from an actor that requested none."""
    limits: list[tuple[torch.device, float]] = []
    context = SimpleNamespace(get_accelerator_ids=lambda: given, get_assigned_resources=lambda: {"GPU": 0.2})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(given_device, "limit_memory", lambda *limit: limits.append(limit))
    with stand_in_gpu():
        found = given_device.given_device()
    assert found == torch.device(device)
    assert limits == ([(found, 0.2)] if found.type == "cuda" else [])


def test_each_actor_of_a_pool_adds_its_request(recipe_file: Path) -> None:
    def cpus(*overrides: str) -> float:
        return needs_of(load_recipe(recipe_file, overrides)).cpus

    base = cpus()
    assert cpus("rollout.num_samplers=3") - base == pytest.approx(sampler_resources("cpu")["num_cpus"])
    assert cpus("learner.num_workers=3") - base == pytest.approx(learner_resources("cpu")["CPU"])
    assert cpus("grading.num_graders=2") - base == pytest.approx(grader_resources()["num_cpus"])


def test_memory_grows_with_the_model_and_with_its_copies(recipe_file: Path) -> None:
    def memory(*overrides: str) -> int:
        return needs_of(load_recipe(recipe_file, overrides)).memory_bytes

    wide = ("model.d_model=1024", "model.num_layers=12", "model.mlp_hidden_size=4096")
    assert memory(*wide) > memory() + 4e9
    exact = (
        "learner.estimator={name: trajectory, steps_per_segment: 1, law: sampler}",
        "learner.objective.old=sampler",
    )
    assert memory(*wide, *exact, "learner.max_staleness=4") > memory(*wide, *exact)
    assert memory(*wide, "learner.objective.kl_coef=0") < memory(*wide)
