"""What a run takes of the machines that it runs on: CPUs, GPUs, main memory, object store and disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.resources import (
    OBJECT_STORE,
    coordinator_resources,
    grader_resources,
    learner_resources,
    num_gpus_for,
    sampler_resources,
    store_resources,
)
from deploy.capacity.activations import FLOAT32
from deploy.capacity.learner_memory import main_memory_of_learner
from deploy.capacity.memory import Part, published_bytes, sampler_weight_bytes, versions_at_a_time
from deploy.capacity.shape import ParameterCounts, begins_merged, policy_shape
from deploy.recipe.recipe import Recipe
from learner.model.config import TransformerConfig
from rewards import make_task

CPU_TOLERANCE = 1e-6
"""Sums of decimal fractions, 0.4 + 0.4 + 0.1 + ..., against a whole number of CPUs."""
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
    memory: tuple[Part, ...]
    """What takes main memory, at least: processes, weights and what is written of them, without activations."""
    object_store_bytes: int
    """Of Ray's object store on the machine that holds most of it: the policy versions that are there at a time."""
    disk_bytes: int
    """Of the disk of `runs_dir`: the checkpoints that are kept at a time."""

    @property
    def memory_bytes(self) -> int:
        """All of the main memory."""
        return int(sum(part.num_bytes for part in self.memory))


def needs_of(recipe: Recipe, *, serve: bool = False, num_machines: int = 1) -> Needs:
    """What a run of the recipe takes, and with `serve` its service; engines on CPUs take next to nothing of Ray."""
    samplers, workers = recipe.rollout.num_samplers, recipe.learner.num_workers
    gpus, is_on_gpus = recipe.gpus, recipe.device == "cuda"
    sampler = sampler_resources(recipe.device, gpus.asked_for_sampler)
    worker = learner_resources(recipe.device, gpus.asked_for_learner)
    shares = [gpus.asked_for_sampler] * samplers + [gpus.asked_for_learner] * workers
    shares += [gpus.engine] * recipe.service.num_replicas if serve and gpus.engine else []
    small = coordinator_resources()["num_cpus"] + store_resources()["num_cpus"]
    cpus = small + recipe.grading.num_graders * grader_resources()["num_cpus"]
    shape = _shape(recipe)
    return Needs(
        cpus=round(cpus + samplers * sampler["num_cpus"] + workers * worker["CPU"], 3),
        gpus=num_gpus_for(shares) if is_on_gpus else 0,
        memory=(*_processes(recipe), *(() if shape is None else _weights(recipe, shape))),
        object_store_bytes=0 if shape is None else _object_store_bytes(recipe, shape, num_machines),
        disk_bytes=0 if shape is None else _disk_bytes(recipe, shape),
    )


def checkpoint_bytes(recipe: Recipe) -> int:
    """What a checkpoint of a stage under way takes. Of a policy whose config cannot be had, nothing."""
    shape = _shape(recipe)
    return 0 if shape is None else _checkpoint_bytes(recipe, ParameterCounts.of(shape, recipe.model.lora))


def _shape(recipe: Recipe) -> TransformerConfig | None:
    """None of a checkpoint that cannot be used: the preflight says why."""
    try:
        return policy_shape(recipe)
    except ValueError:
        return None


def _processes(recipe: Recipe) -> Iterator[Part]:
    """What the processes of a run take without a policy."""
    num_with_torch, num_without = recipe.rollout.num_samplers + recipe.learner.num_workers, recipe.grading.num_graders
    with_torch, without = num_with_torch * _PROCESS_BYTES, (num_without + 2) * _PROCESS_WITHOUT_TORCH_BYTES
    problems = _problem_copies(recipe) * _problem_bytes(recipe)
    yield Part(
        name="processes",
        num_bytes=_RAY_BYTES + with_torch + without,
        helps="fewer rollout.num_samplers, learner.num_workers or grading.num_graders",
    )
    yield Part(name="problems", num_bytes=problems, helps="fewer num_train_problems or evaluation.num_problems")


def _weights(recipe: Recipe, shape: TransformerConfig) -> Iterator[Part]:
    """What the policy takes of main memory. A checkpoint on disk is read by way of the page cache, which gives way."""
    counts, lora = ParameterCounts.of(shape, recipe.model.lora), recipe.model.lora
    smaller = "a smaller model.lora.rank" if lora.rank else "LoRA (model.lora.rank)"
    yield Part(name="policy versions", num_bytes=_version_bytes(recipe, counts), helps=smaller)
    # Gathered on rank 0, and written while the training goes on.
    yield Part(name="a checkpoint that is written", num_bytes=_checkpoint_bytes(recipe, counts), helps=smaller)
    learner_helps = "gpus.colocate=false" if recipe.gpus.colocate else "sharding.cpu_offload=false"
    learner_helps = learner_helps if recipe.device == "cuda" else smaller
    yield Part(
        name="weights and moments of the learner", num_bytes=main_memory_of_learner(recipe, shape), helps=learner_helps
    )
    if recipe.device == "cpu":
        # What is fetched of the next version is read where the object store has it.
        sampled = recipe.rollout.num_samplers * sampler_weight_bytes(recipe, counts)
        yield Part(name="policies of the samplers", num_bytes=sampled, helps="fewer rollout.num_samplers")


def _version_bytes(recipe: Recipe, counts: ParameterCounts) -> float:
    """Of the versions in object stores at a time; of an adapter, beside these, the one that rank 0 hands over."""
    if recipe.weight_transport != OBJECT_STORE:
        return 0
    return (versions_at_a_time(recipe) + (recipe.model.lora.rank > 0)) * published_bytes(recipe, counts)


def _object_store_bytes(recipe: Recipe, shape: TransformerConfig, num_machines: int) -> int:
    """What one machine has of them at least. An adapter is where the weight store is; rows of whole weights are where
    the rank is that has them, and a version is whole where a sampler reads it."""
    counts, workers = ParameterCounts.of(shape, recipe.model.lora), recipe.learner.num_workers
    of_versions = _version_bytes(recipe, counts)
    if recipe.model.lora.rank or not of_versions:
        return int(of_versions)
    of_fullest = -(-workers // num_machines) / workers
    return int(max(of_versions * of_fullest, published_bytes(recipe, counts)))


def _disk_bytes(recipe: Recipe, shape: TransformerConfig) -> int:
    """Of the checkpoints at a time: the newest, the last round's beside the control's, the best, and one that is being
    written; what SFT and the control end with, without moments; and a policy that is made from scratch or merged from
    a LoRA checkpoint. Another checkpoint that a run starts from stays where it is."""
    counts = ParameterCounts.of(shape, recipe.model.lora)
    num_passing = recipe.num_checkpoints_kept + 2 + recipe.control.enabled
    num_ends = (recipe.sft.num_steps > 0) + recipe.control.enabled
    is_written = recipe.model.checkpoint is None or begins_merged(recipe)
    initial = FLOAT32 * counts.policy if is_written else 0
    return num_passing * _checkpoint_bytes(recipe, counts) + num_ends * FLOAT32 * _saved(counts) + initial


def _checkpoint_bytes(recipe: Recipe, counts: ParameterCounts) -> int:
    """What is trained, with AdamW's moments, and a reference that has moved: all in float32."""
    has_moved = recipe.learner.reference_sync_rounds > 0
    return FLOAT32 * (3 + has_moved) * _saved(counts)


def _saved(counts: ParameterCounts) -> int:
    """Parameters that a checkpoint has: the adapter's, or all."""
    return counts.adapter or counts.policy


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
