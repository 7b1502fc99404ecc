"""Resource needs of a run: CPUs, GPUs, main memory, object store and disk."""

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
from deploy.capacity.memory import (
    Part,
    main_memory_of_learner,
    published_bytes,
    sampler_weight_bytes,
    versions_at_a_time,
)
from deploy.capacity.shape import begins_merged, known_shape
from deploy.recipe.recipe import Recipe
from learner.model.config import TransformerConfig
from learner.planning.sizes import FLOAT32, ParameterCounts
from rewards import make_task

CPU_TOLERANCE = 1e-6
"""Rounding tolerance of sums of decimal fractions, 0.4 + 0.4 + 0.1 + ..., against a whole number of CPUs."""
# Measured: a process with torch and Ray in it has 310 MB, one without torch 165 MB, Ray's own processes and the driver
# have 1.5 GB together.
_PROCESS_BYTES, _PROCESS_WITHOUT_TORCH_BYTES = 310_000_000, 165_000_000
_RAY_BYTES = 1_500_000_000
# Measured: the Python objects of a task's problem, without its texts; a token in a tuple.
_PROBLEM_BYTES, _TOKEN_BYTES = 600, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Resources that a run needs."""

    cpus: float
    """Logical CPUs."""
    gpus: int
    """GPUs."""
    memory: tuple[Part, ...]
    """Lower bound of the main memory: processes, weights and the checkpoint being written, without activations."""
    object_store_bytes: int
    """Ray's object store on the machine that holds most of it: the policy versions that exist at a time."""
    version_bytes: int
    """Ray's object store on each machine with samplers: one policy version, while it arrives."""
    disk_bytes: int
    """Disk space in `runs_dir`: the checkpoints that exist at a time."""

    @property
    def memory_bytes(self) -> int:
        """Total main memory."""
        return int(sum(part.num_bytes for part in self.memory))


def needs_of(recipe: Recipe, *, serve: bool = False, num_machines: int = 1) -> Needs:
    """Derive what a run needs, and with `serve` its service; engines on CPUs reserve next to nothing from Ray."""
    samplers, workers = recipe.rollout.num_samplers, recipe.learner.num_workers
    gpus = recipe.gpus
    sampler = sampler_resources(recipe.device, gpus.sampler_request)
    worker = learner_resources(recipe.device, gpus.learner_request)
    shares = [gpus.sampler_request] * samplers + [gpus.learner_request] * workers
    shares += [gpus.engine] * recipe.service.num_replicas if serve and gpus.engine else []
    small = coordinator_resources()["num_cpus"] + store_resources()["num_cpus"]
    cpus = small + recipe.grading.num_graders * grader_resources()["num_cpus"]
    shape = known_shape(recipe)
    return Needs(
        cpus=round(cpus + samplers * sampler["num_cpus"] + workers * worker["CPU"], 3),
        gpus=num_gpus_for(shares) if recipe.device == "cuda" else 0,
        memory=(*_processes(recipe), *(() if shape is None else _weights(recipe, shape))),
        object_store_bytes=0 if shape is None else _object_store_bytes(recipe, shape, num_machines),
        version_bytes=0 if shape is None else _fetched_bytes(recipe, shape),
        disk_bytes=0 if shape is None else _disk_bytes(recipe, shape),
    )


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return the size of a checkpoint of a stage under way; 0 if the policy's config is not available."""
    shape = known_shape(recipe)
    return 0 if shape is None else _checkpoint_bytes(recipe, ParameterCounts.of(shape, recipe.model.lora))


def _processes(recipe: Recipe) -> Iterator[Part]:
    """Yield the main memory of a run's processes without a policy."""
    num_with_torch = recipe.rollout.num_samplers + recipe.learner.num_workers
    # Without torch: the graders, the coordinator and the weight store.
    processes = num_with_torch * _PROCESS_BYTES + (recipe.grading.num_graders + 2) * _PROCESS_WITHOUT_TORCH_BYTES
    fewer = "fewer rollout.num_samplers, learner.num_workers or grading.num_graders"
    yield Part("processes", _RAY_BYTES + processes, fewer)
    # The driver, the coordinator and each learner worker hold every problem.
    problems = (2 + recipe.learner.num_workers) * _problem_bytes(recipe)
    yield Part("problems", problems, "fewer num_train_problems or evaluation.num_problems")


def _weights(recipe: Recipe, shape: TransformerConfig) -> Iterator[Part]:
    """Yield the main memory of the policy. Reading a checkpoint takes only page cache, which is reclaimable."""
    counts, lora = ParameterCounts.of(shape, recipe.model.lora), recipe.model.lora
    smaller = "a smaller model.lora.rank" if lora.rank else "LoRA (model.lora.rank)"
    yield Part("policy versions", _version_bytes(recipe, counts), smaller)
    # Copied on every rank, or gathered on rank 0, and written in the background.
    yield Part("a checkpoint that is written", _checkpoint_bytes(recipe, counts), smaller)
    learner_helps = smaller
    if recipe.device == "cuda":
        learner_helps = "gpus.colocate=false" if recipe.gpus.colocate else "sharding.cpu_offload=false"
    yield Part("weights and moments of the learner", main_memory_of_learner(recipe, shape), learner_helps)
    if recipe.device == "cpu":
        # The next version is read in place from the object store, and takes no copy.
        sampled = recipe.rollout.num_samplers * sampler_weight_bytes(recipe, counts)
        yield Part("policies of the samplers", sampled, "fewer rollout.num_samplers")


def _version_bytes(recipe: Recipe, counts: ParameterCounts) -> float:
    """Return the bytes of the versions in object stores at a time; for an adapter also the copy from rank 0."""
    if recipe.weight_transport != OBJECT_STORE:
        return 0
    return (versions_at_a_time(recipe) + (recipe.model.lora.rank > 0)) * published_bytes(recipe, counts)


def _fetched_bytes(recipe: Recipe, shape: TransformerConfig) -> int:
    """Return the bytes of a version in the object store of a machine whose samplers fetch it."""
    if recipe.weight_transport != OBJECT_STORE:
        return 0
    return int(published_bytes(recipe, ParameterCounts.of(shape, recipe.model.lora)))


def _object_store_bytes(recipe: Recipe, shape: TransformerConfig, num_machines: int) -> int:
    """Return a lower bound of the versions' bytes on the fullest machine.

    Adapters are on the weight store's machine. Rows of full weights are on the machine of the rank that owns them, and
    a version is complete where a sampler reads it.
    """
    counts, workers = ParameterCounts.of(shape, recipe.model.lora), recipe.learner.num_workers
    of_versions = _version_bytes(recipe, counts)
    if recipe.model.lora.rank or not of_versions:
        return int(of_versions)
    of_fullest = -(-workers // num_machines) / workers
    return int(max(of_versions * of_fullest, published_bytes(recipe, counts)))


def _disk_bytes(recipe: Recipe, shape: TransformerConfig) -> int:
    """Return the disk space of the checkpoints that exist at a time.

    With optimizer moments: the newest (`num_checkpoints_kept`), the best, one that is being written, and with a control
    the last round's. Without moments: the results of SFT and the control. An initial policy counts if it is made from
    scratch or merged from a LoRA checkpoint; any other stays where it is.
    """
    counts = ParameterCounts.of(shape, recipe.model.lora)
    num_resumable = recipe.num_checkpoints_kept + 2 + recipe.control.enabled
    num_ends = (recipe.sft.num_steps > 0) + recipe.control.enabled
    is_written = recipe.model.checkpoint is None or begins_merged(recipe)
    initial = FLOAT32 * counts.policy if is_written else 0
    return (
        num_resumable * _checkpoint_bytes(recipe, counts)
        + num_ends * FLOAT32 * (counts.adapter or counts.policy)
        + initial
    )


def _checkpoint_bytes(recipe: Recipe, counts: ParameterCounts) -> int:
    """Return the size of trained parameters, AdamW's moments, and a reference that was synced: all in float32."""
    has_moved = recipe.learner.reference_sync_rounds > 0
    return FLOAT32 * (3 + has_moved) * (counts.adapter or counts.policy)


def _problem_bytes(recipe: Recipe) -> int:
    """Estimate the memory of a run's problems and prompts in one process; 0 for a task that cannot be created."""
    try:
        example = make_task(recipe.task).example()
    except ValueError:
        return 0
    num_characters = len(example.reference_completion) + sum(len(message.content) for message in example.messages)
    one = _PROBLEM_BYTES + num_characters + _TOKEN_BYTES * min(num_characters, recipe.rollout.max_prompt_tokens)
    return (recipe.num_train_problems + recipe.evaluation.num_problems) * one
