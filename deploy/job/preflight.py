"""Whether a recipe can run here: what it needs against what there is, before anything starts."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile

from actors.resources import (
    coordinator_resources,
    grader_resources,
    learner_resources,
    num_gpus_for,
    sampler_resources,
    store_resources,
)
from actors.spec import sampler_facts
from deploy import machine
from deploy.errors import UserError, reason
from deploy.job.judges import wanted_servers
from deploy.printing import counted
from deploy.program import program
from deploy.recipe.recipe import Recipe, ServiceSection
from learner.model.checkpoint_files import load_config
from learner.model.hub import find_checkpoint
from rewards import Problem, Split, Task, make_task
from rewards.data.demonstrations import read_demonstrations
from rewards.data.draw import TooFewProblemsError
from rewards.terms.shaping import SpeedConfig

_FLOAT_BYTES = 4
# Measured: a process with torch and Ray in it has 310 MB, one without torch 165 MB, Ray's own processes and the driver
# have 1.5 GB together.
_PROCESS_BYTES, _PROCESS_WITHOUT_TORCH_BYTES = 310_000_000, 165_000_000
_RAY_BYTES = 1_500_000_000
# Measured: a problem of a task in Python's objects, but for its texts; a token in a tuple.
_PROBLEM_BYTES, _TOKEN_BYTES = 600, 8
MOST_LOOKED_AT = 20_000
"""Problems of a split that are made before a run starts, to see that they can be."""
_PROBE_BYTES = 4096
# Sums of decimal fractions: 0.4 + 0.4 + 0.1 + ... against a whole number of CPUs.
_CPU_TOLERANCE = 1e-6
_CONNECT_TIMEOUT_S = 5.0
_LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a run takes."""

    cpus: float
    """Logical CPUs."""
    gpus: int
    """GPUs."""
    memory_bytes: int
    """Main memory, at least: processes and copies of the weights, without activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What there is to run on."""

    where: str
    """Whose they are, for sentences: `this machine`, `the cluster at 10.0.0.1:6379`."""
    cpus: float
    """Logical CPUs."""
    gpus: int
    """GPUs."""
    memory_bytes: int
    """Main memory."""
    is_ours: bool
    """Whether the run would start its own Ray on it."""


def needs_of(recipe: Recipe, *, serve: bool = False) -> Needs:
    """What a run of the recipe takes, and with `serve` its service; engines on CPUs take next to nothing of Ray."""
    samplers, workers = recipe.rollout.num_samplers, recipe.learner.num_workers
    sampler = sampler_resources(recipe.device, recipe.gpus.sampler)
    worker, is_on_gpus = learner_resources(recipe.device, recipe.gpus.learner), recipe.device == "cuda"
    shares = [recipe.gpus.sampler] * samplers + [recipe.gpus.learner] * workers
    shares += [recipe.gpus.engine] * recipe.service.num_replicas if serve and recipe.gpus.engine else []
    small = coordinator_resources()["num_cpus"] + store_resources()["num_cpus"]
    cpus = small + recipe.grading.num_graders * grader_resources()["num_cpus"]
    num_with_torch, num_without = samplers + workers, recipe.grading.num_graders + 2
    return Needs(
        cpus=round(cpus + samplers * sampler["num_cpus"] + workers * worker["CPU"], 3),
        gpus=num_gpus_for(shares) if is_on_gpus else 0,
        memory_bytes=_RAY_BYTES
        + num_with_torch * _PROCESS_BYTES
        + num_without * _PROCESS_WITHOUT_TORCH_BYTES
        + _weight_copies(recipe) * _weight_bytes(recipe)
        + _problem_copies(recipe) * _problem_bytes(recipe),
    )


def cluster_resources(address: str | None) -> Resources:
    """What the running cluster at `address` has, or this machine where there is none.

    Raises UserError when nothing answers at the address.
    """
    if address is None:
        return Resources(
            where="this machine",
            cpus=machine.num_cpus(),
            gpus=machine.num_gpus(),
            memory_bytes=machine.memory_bytes(),
            is_ours=True,
        )
    _check_address(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"no Ray cluster answers at RAY_ADDRESS {address}: {first_line}") from error
    try:
        total = ray.cluster_resources()
    finally:
        ray.shutdown()
    memory = total.get("memory", 0) + total.get("object_store_memory", 0)
    return Resources(
        where=f"the cluster at {address}",
        cpus=total.get("CPU", 0),
        gpus=int(total.get("GPU", 0)),
        memory_bytes=int(memory),
        is_ours=False,
    )


def _check_address(address: str) -> None:
    """Raise UserError for an address that cannot work: Ray itself would take more than a minute to say so."""
    if "://" in address:
        raise UserError(
            f"RAY_ADDRESS is {address}, and a run connects to a cluster's HOST:PORT from one of its machines; "
            f"use `{program()} submit`, or unset it to run on this machine"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        # A word like `auto`, or what Ray itself refuses at once.
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS {address}: {reason(error)}; unset it to run on this machine"
        ) from error


def preflight(recipe: Recipe, available: Resources, *, resume: bool = False, serve: bool = False) -> list[str]:
    """Why the recipe cannot run, in sentences that say what would help; empty when it can."""
    problems = [
        *_resource_problems(recipe, needs_of(recipe, serve=serve), available),
        *_pool_problems(recipe),
        *_run_dir_problems(recipe, resume),
        *_input_problems(recipe),
    ]
    problems += _judge_problems(recipe, available)
    # On a cluster the service may already be up for this run; Serve itself refuses a foreign one.
    if serve and available.is_ours:
        problems += _port_problems(recipe.service)
    return problems


def _port_problems(service: ServiceSection) -> Iterator[str]:
    listeners = [("the service", "port", service.host, service.port)]
    if service.admin_port is not None:
        listeners.append(("the admin listener", "admin_port", service.admin_host, service.admin_port))
    for who, field, host, port in listeners:
        if obstacle := machine.why_not_bindable(host, port):
            yield f"{who} cannot listen on {host}:{port}: {obstacle}; take another service.{field}"


def _resource_problems(recipe: Recipe, needs: Needs, available: Resources) -> Iterator[str]:
    where = available.where
    samplers = counted(recipe.rollout.num_samplers, "sampler")
    pools = f"{samplers}, {counted(recipe.learner.num_workers, 'learner worker')}"
    if needs.gpus > available.gpus:
        yield (
            f"the recipe needs {counted(needs.gpus, 'GPU')} ({pools}) and {where} has {available.gpus}; "
            "take device=cpu, fewer rollout.num_samplers and learner.num_workers, or shares of GPUs (gpus.sampler)"
        )
    if needs.cpus > available.cpus + _CPU_TOLERANCE:
        yield (
            f"the recipe needs {needs.cpus:g} CPUs ({pools}, {counted(recipe.grading.num_graders, 'grader')}, 2 more) "
            f"and {where} has {available.cpus:g}; take fewer rollout.num_samplers or learner.num_workers"
        )
    if needs.memory_bytes > available.memory_bytes:
        yield (
            f"the recipe needs at least {gigabytes(needs.memory_bytes)} of memory ({pools}) and {where} has "
            f"{gigabytes(available.memory_bytes)}; take fewer of them or a smaller model"
        )


def _pool_problems(recipe: Recipe) -> Iterator[str]:
    """GPUs of samplers that would never have anything to do in the rounds. On a CPU such a sampler costs nothing."""
    rollout, learner = recipe.rollout, recipe.learner
    at_a_time = learner.max_staleness + 1
    portions = recipe.portions_per_round * at_a_time
    if recipe.device == "cpu" or not learner.num_rounds or portions >= rollout.num_samplers:
        return
    fitting = learner.groups_per_round * at_a_time // rollout.num_samplers * learner.group_size
    smaller = f"rollout.batch_size={fitting} or " if fitting else ""
    yield (
        f"rollout.num_samplers is {rollout.num_samplers}, and only {counted(portions, 'portion')} of "
        f"{recipe.portion_groups * learner.group_size} completions can be sampled at a time: the other GPUs would "
        f"wait; take {smaller}rollout.num_samplers={portions}"
    )


def _run_dir_problems(recipe: Recipe, resume: bool) -> Iterator[str]:
    runs_dir, run_dir = recipe.runs_dir, recipe.run_dir
    nearest = machine.nearest_existing(run_dir.parent)
    if not nearest.is_dir():
        yield f"runs_dir {runs_dir} cannot be made: {nearest} is a file; take another runs_dir"
    elif obstacle := _why_not_writable(nearest):
        yield f"runs_dir {runs_dir} cannot be written to: {nearest}: {obstacle}; take another runs_dir"
    elif resume and not run_dir.is_dir():
        yield f"there is no run {recipe.name} in {run_dir.parent} to resume; start it without --resume"
    elif not resume and run_dir.exists() and (run_dir.is_file() or any(run_dir.iterdir())):
        yield (
            f"there already is a run {recipe.name} in {run_dir.parent}; choose name=..., or go on with it by --resume"
        )


def _why_not_writable(directory: Path) -> str | None:
    """Why no file can be made there: tried, for a superuser's permissions say nothing, nor do anybody's of the room."""
    try:
        with TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return reason(error)
    return None


def _task_problems(recipe: Recipe) -> Iterator[str]:
    try:
        task = make_task(recipe.task)
    except ValueError as error:
        yield f"task: {error}"
        return
    evaluation, num_eval = recipe.evaluation, recipe.sft.num_eval
    # SFT's loss is looked at on those that may choose.
    num_of_heldout = 0 if evaluation.num_validation else num_eval
    asked = {
        Split.TRAIN: ("num_train_problems", recipe.num_train_problems, recipe.sft.num_labels),
        Split.HELDOUT: ("evaluation.num_problems", evaluation.num_problems, num_of_heldout),
    }
    if evaluation.num_validation:
        asked[Split.VALIDATION] = "evaluation.num_validation", evaluation.num_validation, num_eval
    for split, (key, count, num_labels) in asked.items():
        try:
            problems = _looked_at(task, split, count, recipe.seed if split is Split.TRAIN else 0)
        except ValueError as error:
            yield f"{key} is {count}: {error}"
            continue
        labels = problems[:num_labels] if recipe.sft.data is None and recipe.sft.num_steps else []
        if unlabelled := [problem for problem in labels if not problem.demonstration]:
            yield (
                f"SFT is to train on the {split} problems of {recipe.task.name}, and {unlabelled[0].problem_id} has no "
                "right completion in its file; give sft.data, or take sft.num_steps=0"
            )
        if split is Split.TRAIN and recipe.reward.terms:
            yield from _reward_problems(recipe, task.grade(problems[0], "").parts)


def _looked_at(task: Task, split: Split, count: int, seed: int) -> list[Problem]:
    """The first of `count` problems of a split: they show that a task can be run, and millions take minutes to make.

    Raises ValueError, in one sentence, where the split has fewer than `count`.
    """
    if count > MOST_LOOKED_AT and count > (most := task.at_most(split)):
        raise ValueError(
            f"the {split} split of {task.name} has at most {most} problems with this config, but {count} were asked for"
        )
    try:
        return task.problems(split, min(count, MOST_LOOKED_AT), seed)
    except TooFewProblemsError as error:
        raise TooFewProblemsError(task=task.name, split=split, available=error.available, count=count) from error


def _reward_problems(recipe: Recipe, task_parts: Collection[str]) -> Iterator[str]:
    try:
        recipe.reward.check(task_parts)
    except ValueError as error:
        yield f"reward.{error}"


def _judge_problems(recipe: Recipe, available: Resources) -> Iterator[str]:
    servers = list(wanted_servers(recipe.reward).values())
    if servers and not available.is_ours:
        name, judge, _ = servers[0]
        yield (
            f"reward.terms.{name}.vllm: d1 starts it on this machine alone, and graders of {available.where} may be on "
            f"others; start it yourself (vllm serve {judge.model}) and name its address in base_url"
        )


def _refusals(recipe: Recipe) -> Iterator[str]:
    """Why the learner cannot learn from what is sampled: for each of the schedules that it cannot learn from."""
    for index, params in enumerate(recipe.rollout.params):
        place = "" if recipe.rollout.schedules is None else f" (rollout.schedules[{index}])"
        if refusal := recipe.learner.refusal(sampler_facts(params)):
            yield f"learner.{refusal}{place}"


def _input_problems(recipe: Recipe) -> Iterator[str]:
    yield from _task_problems(recipe)
    yield from islice(_refusals(recipe), 1)
    yield from _speed_problems(recipe)
    if recipe.sft.data is not None:
        try:
            read_demonstrations(recipe.sft.data)
        except ValueError as error:
            yield f"sft.data: {error}"
    if recipe.wandb_project is not None and find_spec("wandb") is None:
        yield "wandb_project is set and the package wandb is missing; pip install 'd1[wandb]', or leave it out"
    if recipe.model.lora.base_weights == "nf4" and find_spec("bitsandbytes") is None:
        yield "model.lora.base_weights is nf4 and the package bitsandbytes is missing; pip install 'd1[quantized]'"
    if recipe.model.checkpoint is not None:
        try:
            load_config(find_checkpoint(recipe.model.checkpoint, config_only=True))
        except ValueError as error:
            yield f"model.checkpoint: {error}"


def _speed_problems(recipe: Recipe) -> Iterator[str]:
    least = recipe.learner.filters.min_speed_range
    if least and not any(isinstance(term, SpeedConfig) for term in recipe.reward.terms.values()):
        yield (
            f"learner.filters.min_speed_range is {least:g} and the reward has no term of kind speed; add "
            "reward.terms.fast='{kind: speed}', or take learner.filters.min_speed_range=0"
        )


def _weight_copies(recipe: Recipe) -> int:
    """Copies of the weights on CPUs: the learner's state over all its workers, every sampler's, and the store's."""
    has_adapter = recipe.model.lora.rank > 0
    # Of an adapter's versions the store has the base, once, and one may be on its way there.
    published = 2 if has_adapter else 2 + recipe.learner.max_staleness
    if recipe.device == "cuda":
        return published
    # Weights, gradient, two moments of AdamW, and the whole weights once more when they are published. An adapter has
    # gradient and moments of its own, which are small, and needs no copy for a reference.
    learner = 2 if has_adapter else 5 + recipe.learner.objective.needs_reference
    # A sampler stages the next version beside the one it uses; a base it reads where the store has it.
    return learner + (1 if has_adapter else 2) * recipe.rollout.num_samplers + published


def _weight_bytes(recipe: Recipe) -> int:
    if recipe.model.checkpoint is not None:
        return _checkpoint_bytes(recipe.model.checkpoint)
    model = recipe.model
    block = 4 * model.d_model**2 + 3 * model.d_model * model.mlp_hidden_size
    return _FLOAT_BYTES * (2 * model.vocab_size * model.d_model + model.num_layers * block)


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


def _checkpoint_bytes(reference: Path) -> int:
    """What a checkpoint's weights take in memory. Of one that cannot be used, nothing: `preflight` says why."""
    # Here and not above: most recipes name no checkpoint, and torch takes a second.
    import torch

    from learner.model.networks import make_model

    try:
        config = load_config(find_checkpoint(reference, config_only=True))
    except ValueError:
        return 0
    with torch.device("meta"):
        model = make_model(config)
    return _FLOAT_BYTES * sum(parameter.numel() for parameter in model.parameters())


def gigabytes(num_bytes: float) -> str:
    """A size for people."""
    return f"{num_bytes / 1e9:.1f} GB"
