"""What a run takes of the machines that it runs on: CPUs, GPUs, main memory, object store and disk."""

from __future__ import annotations

from dataclasses import dataclass

from actors.resources import (
    coordinator_resources,
    grader_resources,
    learner_resources,
    num_gpus_for,
    sampler_resources,
    store_resources,
)
from deploy.capacity.memory import asleep_bytes
from deploy.capacity.shape import ParameterCounts, policy_shape
from deploy.recipe.recipe import Recipe
from rewards import make_task

CPU_TOLERANCE = 1e-6
"""Sums of decimal fractions, 0.4 + 0.4 + 0.1 + ..., against a whole number of CPUs."""
_FLOAT_BYTES = 4
# Measured: a process with torch and Ray in it has 310 MB, one without torch 165 MB, Ray's own processes and the driver
# have 1.5 GB together.
_PROCESS_BYTES, _PROCESS_WITHOUT_TORCH_BYTES = 310_000_000, 165_000_000
_RAY_BYTES = 1_500_000_000
# Measured: a problem of a task in Python's objects, but for its texts; a token in a tuple.
_PROBLEM_BYTES, _TOKEN_BYTES = 600, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a run takes."""

    cpus: float
    """Logical CPUs."""
    gpus: int
    """GPUs."""
    memory_bytes: int
    """Main memory, at least: processes and copies of the weights, without activations."""
    object_store_bytes: int
    """Of Ray's object store: the policy versions that it holds at a time."""
    disk_bytes: int
    """Of the disk of `runs_dir`: the checkpoints that are kept at a time."""


def needs_of(recipe: Recipe, *, serve: bool = False) -> Needs:
    """What a run of the recipe takes, and with `serve` its service; engines on CPUs take next to nothing of Ray."""
    samplers, workers = recipe.rollout.num_samplers, recipe.learner.num_workers
    gpus, is_on_gpus = recipe.gpus, recipe.device == "cuda"
    sampler = sampler_resources(recipe.device, gpus.asked_for_sampler)
    worker = learner_resources(recipe.device, gpus.asked_for_learner)
    shares = [gpus.asked_for_sampler] * samplers + [gpus.asked_for_learner] * workers
    shares += [gpus.engine] * recipe.service.num_replicas if serve and gpus.engine else []
    small = coordinator_resources()["num_cpus"] + store_resources()["num_cpus"]
    cpus = small + recipe.grading.num_graders * grader_resources()["num_cpus"]
    weight_bytes = _weight_bytes(recipe)
    num_with_torch, num_without = samplers + workers, recipe.grading.num_graders + 2
    return Needs(
        cpus=round(cpus + samplers * sampler["num_cpus"] + workers * worker["CPU"], 3),
        gpus=num_gpus_for(shares) if is_on_gpus else 0,
        memory_bytes=_RAY_BYTES
        + num_with_torch * _PROCESS_BYTES
        + num_without * _PROCESS_WITHOUT_TORCH_BYTES
        + _weight_copies(recipe) * weight_bytes
        + _asleep_bytes(recipe)
        + _problem_copies(recipe) * _problem_bytes(recipe),
        object_store_bytes=_published_copies(recipe) * weight_bytes,
        disk_bytes=_disk_bytes(recipe),
    )


def _weight_copies(recipe: Recipe) -> int:
    """Copies of the weights on CPUs: the learner's state over all its workers, every sampler's, and the store's."""
    has_adapter, published = recipe.model.lora.rank > 0, _published_copies(recipe)
    if recipe.device == "cuda":
        return published
    # Weights, gradient, two moments of AdamW, and the whole weights once more when they are published. An adapter has
    # gradient and moments of its own, which are small, and needs no copy for a reference.
    learner = 2 if has_adapter else 5 + recipe.learner.objective.needs_reference
    # A sampler stages the next version beside the one it uses; a base it reads where the store has it.
    return learner + (1 if has_adapter else 2) * recipe.rollout.num_samplers + published


def _asleep_bytes(recipe: Recipe) -> int:
    """What a learner that sleeps has in main memory. Of a checkpoint that cannot be used, nothing."""
    try:
        return int(asleep_bytes(recipe, policy_shape(recipe)))
    except ValueError:
        return 0


def _published_copies(recipe: Recipe) -> int:
    """Copies of the weights in the object store: of an adapter's versions the base, once, and one may be on its way
    there."""
    return 2 if recipe.model.lora.rank else 2 + recipe.learner.max_staleness


def _disk_bytes(recipe: Recipe) -> int:
    """Of the checkpoints at a time: the newest, the ends of the stages, the best, and one that is being written.

    Each has what is trained, with AdamW's moments. Under LoRA the newest and the best have no weights beside it, but in
    4 bits.
    """
    ends = (recipe.sft.num_steps > 0) + (recipe.learner.num_rounds > 0) + recipe.control.enabled
    has_weights_beside = recipe.model.lora.rank and recipe.model.lora.base_weights == "full"
    whole = checkpoint_bytes(recipe) + (_weight_bytes(recipe) if has_weights_beside else 0)
    return (recipe.num_checkpoints_kept + 1) * checkpoint_bytes(recipe) + (ends + 1) * whole


def checkpoint_bytes(recipe: Recipe) -> int:
    """What one of a stage under way takes: what is trained, with AdamW's moments, and in 4 bits the weights."""
    lora = recipe.model.lora
    if not lora.rank:
        return 3 * _weight_bytes(recipe)
    return 3 * _adapter_bytes(recipe) + (_weight_bytes(recipe) if lora.base_weights == "nf4" else 0)


def _weight_bytes(recipe: Recipe) -> int:
    """What the weights take in float32, an adapter not counted."""
    counts = _counts(recipe)
    return 0 if counts is None else _FLOAT_BYTES * counts.policy


def _adapter_bytes(recipe: Recipe) -> int:
    """What LoRA's matrices take in float32."""
    counts = _counts(recipe)
    return 0 if counts is None else _FLOAT_BYTES * counts.adapter


def _counts(recipe: Recipe) -> ParameterCounts | None:
    """None of a checkpoint that cannot be used: the preflight says why."""
    try:
        return ParameterCounts.of(policy_shape(recipe), recipe.model.lora)
    except ValueError:
        return None


def _problem_copies(recipe: Recipe) -> int:
    """Processes that hold every problem: the driver, the coordinator and each learner worker."""
    return 2 + recipe.learner.num_workers


def _problem_bytes(recipe: Recipe) -> int:
    """What a run's problems and their prompts take in one process. Of a task that cannot be made, nothing."""
    try:
        example = make_task(recipe.task).example()
    except ValueError:
        return 0
    num_characters = len(example.demonstration) + sum(len(message.content) for message in example.messages)
    one = _PROBLEM_BYTES + num_characters + _TOKEN_BYTES * min(num_characters, recipe.rollout.max_prompt_tokens)
    return (recipe.num_train_problems + recipe.evaluation.num_problems) * one
