"""What actors ask for and what the preflight counts are the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.resources import grader_resources, learner_resources, sampler_resources
from deploy.job.preflight import needs_of
from deploy.recipe.overrides import load_recipe


def test_two_cores_place_the_default_pools(recipe_file: Path) -> None:
    needs = needs_of(load_recipe(recipe_file, []))
    assert needs.cpus == pytest.approx(1.9)
    assert needs.gpus == 0


def test_on_cuda_every_sampler_and_learner_worker_has_a_gpu(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["device=cuda", "rollout.num_samplers=3"])
    assert needs_of(recipe).gpus == 5
    assert sampler_resources("cuda")["num_gpus"] == learner_resources("cuda")["GPU"] == 1
    assert "GPU" not in learner_resources("cpu")


def test_another_actor_of_a_pool_adds_what_it_asks_for(recipe_file: Path) -> None:
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
