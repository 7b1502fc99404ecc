"""Preflight checks of a recipe: what it needs against what is available, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice

from actors.registry.registry import check_registry
from actors.resources import OBJECT_STORE
from actors.spec import sampler_facts
from deploy import machine
from deploy.capacity.available import Resources
from deploy.capacity.memory import engine_memory, largest, learner_memory, sampler_memory, why_too_large
from deploy.capacity.needs import CPU_TOLERANCE, Needs, needs_of
from deploy.capacity.shape import known_shape, policy_shape
from deploy.job.judges import wanted_servers
from deploy.printing import counted, gigabytes
from deploy.recipe.recipe import Recipe
from learner.model.config import TransformerConfig
from rewards import Problem, Split, Task, make_task
from rewards.data.demonstrations import read_demonstrations
from rewards.data.sampling import TooFewProblemsError
from rewards.terms.shaping import SpeedConfig
from rollout.field_error import FieldError
from rollout.request_checks import check_params

MAX_CHECKED_PROBLEMS = 20_000
"""Maximum number of problems of a split that are generated before a run, to check that they can be."""


def preflight(
    recipe: Recipe,
    available: Resources,
    *,
    resume: bool = False,
    serve: bool = False,
    on_warning: Callable[[str], object] | None = None,
) -> list[str]:
    """Return why the recipe cannot run, in sentences that say what would help; empty if it can.

    `on_warning` receives warnings that prevent no run, such as a machine with a small object store.
    """
    needs = needs_of(recipe, serve=serve, num_machines=available.num_machines)
    problems = [
        *resource_problems(recipe, needs, available),
        *_gpu_memory_problems(recipe, available, serve=serve),
        *_pool_problems(recipe),
    ]
    if on_warning is not None:
        for warning in _store_warnings(recipe, needs, available):
            on_warning(warning)
    try:
        check_registry(available.num_machines)
    except (ValueError, ConnectionError) as error:
        problems.append(str(error))
    problems += list(_run_dir_problems(recipe, resume)) or _disk_problems(recipe, needs, resume=resume)
    problems += _input_problems(recipe, on_warning)
    # On a cluster the service may already be up for this run; Ray Serve itself refuses a foreign one.
    service = recipe.service
    if serve and available.is_ours and (obstacle := machine.why_not_bindable(service.host, service.port)):
        problems.append(
            f"the service cannot listen on {service.host}:{service.port}: {obstacle}; take another service.port"
        )
    for name, judge, _ in wanted_servers(recipe.reward).values() if not available.is_ours else ():
        problems.append(
            f"reward.terms.{name}.vllm: d1 starts it on this machine alone, and graders of {available.where} may be on "
            f"others; start it yourself (vllm serve {judge.model}) and name its address in base_url"
        )
    return problems


def resource_problems(recipe: Recipe, needs: Needs, available: Resources) -> Iterator[str]:
    where = available.where
    samplers = counted(recipe.rollout.num_samplers, "sampler")
    pools = f"{samplers}, {counted(recipe.learner.num_workers, 'learner worker')}"
    if needs.gpus > available.gpus:
        yield (
            f"the recipe needs {counted(needs.gpus, 'GPU')} ({pools}) and {where} has {available.gpus}; "
            "take device=cpu, fewer rollout.num_samplers and learner.num_workers, or share GPUs (gpus.colocate, "
            "gpus.sampler)"
        )
    if needs.cpus > available.cpus + CPU_TOLERANCE:
        yield (
            f"the recipe needs {needs.cpus:g} CPUs ({pools}, {counted(recipe.grading.num_graders, 'grader')}, 2 more) "
            f"and {where} has {available.cpus:g}; take fewer rollout.num_samplers or learner.num_workers"
        )
    if needs.memory_bytes > available.memory_bytes:
        most = largest(needs.memory)
        yield (
            f"the recipe needs at least {gigabytes(needs.memory_bytes)} of memory ({most.name} "
            f"{gigabytes(most.num_bytes)}) and {where} has {gigabytes(available.memory_bytes)}; take {most.helps}, or "
            "a smaller model"
        )
    if needs.object_store_bytes > available.object_store_bytes:
        lora, engine = recipe.model.lora, recipe.rollout.engine
        ways = ["a smaller model.lora.rank" if lora.rank else "LoRA (model.lora.rank)"]
        ways += ["rollout.engine.dtype=bfloat16"] if engine.dtype == "float32" and not lora.rank else []
        ways += ["a smaller learner.max_staleness"] if recipe.learner.max_staleness else []
        largest_store = "that" if available.num_machines == 1 else "the largest"
        yield (
            f"policy versions take {gigabytes(needs.object_store_bytes)} of Ray's object store on one machine, and "
            f"{largest_store} of {where} has {gigabytes(available.object_store_bytes)}; take "
            f"{', '.join(ways)}, or start Ray with a larger --object-store-memory"
        )


def _store_warnings(recipe: Recipe, needs: Needs, available: Resources) -> Iterator[str]:
    """Warn of machines that may get samplers, and whose object store is smaller than a policy version."""
    with_device = (one for one in available.machines if one.has_gpu or recipe.device == "cpu")
    if small := [one for one in with_device if one.object_store_bytes < needs.version_bytes]:
        least = min(one.object_store_bytes for one in small)
        yield (
            f"a policy version takes {gigabytes(needs.version_bytes)}, and Ray's object store on "
            f"{', '.join(one.address for one in small)} has {gigabytes(least)}, so that Ray would keep it in files on "
            "disk; start Ray there with a larger --object-store-memory"
        )


def _gpu_memory_problems(recipe: Recipe, available: Resources, *, serve: bool) -> Iterator[str]:
    """Report processes that exceed their share of a GPU. An unreadable checkpoint config is reported elsewhere."""
    if recipe.device == "cpu" or available.gpu_memory_bytes is None or (shape := known_shape(recipe)) is None:
        return
    # The fewest workers hold the largest parts of the policy.
    processes = [sampler_memory(recipe, shape), learner_memory(recipe, shape, recipe.learner_sizes[-1])]
    if serve and recipe.gpus.engine:
        processes.append(engine_memory(recipe, shape, recipe.service.max_live_versions))
    for process in processes:
        if refusal := why_too_large(process, available.gpu_memory_bytes, f"a GPU of {available.where}"):
            yield refusal


def _disk_problems(recipe: Recipe, needs: Needs, *, resume: bool) -> Iterator[str]:
    free = machine.free_bytes(recipe.run_dir.parent)
    # A resumed run has most of its checkpoints already.
    if needs.disk_bytes > free and not resume:
        yield (
            f"the checkpoints of the recipe take up to {gigabytes(needs.disk_bytes)} and the disk of runs_dir "
            f"{recipe.runs_dir} has {gigabytes(free)} free; take another runs_dir, a smaller num_checkpoints_kept or "
            f"{'a smaller model.lora.rank' if recipe.model.lora.rank else 'LoRA (model.lora.rank)'}"
        )


def _pool_problems(recipe: Recipe) -> Iterator[str]:
    """Report samplers whose GPUs would always be idle in the rounds. On a CPU an idle sampler costs nothing."""
    rollout, learner = recipe.rollout, recipe.learner
    at_a_time = learner.max_staleness + 1
    work_units = recipe.work_units_per_round * at_a_time
    if recipe.device == "cpu" or not (learner.num_rounds and work_units) or work_units >= rollout.num_samplers:
        return
    more = -(-rollout.num_samplers // at_a_time)
    also = f" learner.num_workers={work_units}" if recipe.gpus.colocate else ""
    yield (
        f"rollout.num_samplers is {rollout.num_samplers}, and only {counted(work_units, 'work unit')} of "
        f"{recipe.groups_per_work_unit * learner.group_size} completions can be sampled at a time: the other GPUs "
        f"would wait; take learner.groups_per_round={more} or rollout.num_samplers={work_units}{also}"
    )


def _run_dir_problems(recipe: Recipe, resume: bool) -> Iterator[str]:
    runs_dir, run_dir = recipe.runs_dir, recipe.run_dir
    if obstacle := machine.why_not_creatable(run_dir.parent):
        yield f"runs_dir {runs_dir} cannot be written to: {obstacle}; take another runs_dir"
    elif resume and not run_dir.is_dir():
        yield f"there is no run {recipe.name} in {run_dir.parent} to resume; start it without --resume"
    elif not resume and run_dir.exists() and (run_dir.is_file() or any(run_dir.iterdir())):
        yield (
            f"there already is a run {recipe.name} in {run_dir.parent}; choose name=..., or go on with it by --resume"
        )


def _task_problems(recipe: Recipe, on_warning: Callable[[str], object] | None) -> Iterator[str]:
    try:
        task = make_task(recipe.task)
    except ValueError as error:
        yield f"task: {error}"
        return
    evaluation, num_eval = recipe.evaluation, recipe.sft.num_eval
    # SFT's loss is evaluated on the validation problems if there are any, else on the held-out ones.
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
        if unlabelled := [problem for problem in labels if not problem.reference_completion]:
            yield (
                f"SFT is to train on the {split} problems of {recipe.task.name}, and {unlabelled[0].problem_id} has no "
                "right completion in its file; give sft.data, or take sft.num_steps=0"
            )
        if split is Split.TRAIN and recipe.reward.terms:
            try:
                recipe.reward.check(task.grade(problems[0], "").parts)
            except ValueError as error:
                yield f"reward.{error}"
    if on_warning is not None:
        for warning in task.warnings():
            on_warning(warning)


def _looked_at(task: Task, split: Split, count: int, seed: int) -> list[Problem]:
    """Return the first of `count` problems of a split: enough to check a task, while millions take minutes to generate.

    Raises ValueError, in one sentence, if the split has fewer than `count`.
    """
    if count > MAX_CHECKED_PROBLEMS and count > (most := task.max_size(split)):
        raise ValueError(
            f"the {split} split of {task.name} has at most {most} problems with this config, but {count} were asked for"
        )
    try:
        return task.problems(split, min(count, MAX_CHECKED_PROBLEMS), seed)
    except TooFewProblemsError as error:
        raise TooFewProblemsError(task=task.name, split=split, available=error.available, count=count) from error


def _refusals(recipe: Recipe, shape: TransformerConfig | None) -> Iterator[str]:
    """Yield why a policy of this shape (None if unknown) cannot sample as configured, or the learner not train on it.

    With several schedules each sentence names the one that it is about.
    """
    is_block_causal = shape is not None and shape.is_block_causal
    if is_block_causal and recipe.sft.packing:
        yield "sft.packing is true, and each example of a block-causal policy has a row of its own: leave it out"
    for index, params in enumerate(recipe.rollout.params):
        place = "" if recipe.rollout.schedules is None else f" (rollout.schedules[{index}])"
        try:
            if shape is not None:
                check_params(params, shape)
        except FieldError as error:
            yield f"rollout.sampling: {error}{place}"
        facts = sampler_facts(params, is_block_causal=is_block_causal, is_fp8=recipe.rollout.engine.fp8)
        if refusal := recipe.learner.incompatibility(facts):
            yield f"learner.{refusal}{place}"


def _input_problems(recipe: Recipe, on_warning: Callable[[str], object] | None) -> Iterator[str]:
    yield from _task_problems(recipe, on_warning)
    policy, obstacle = None, ""
    try:
        policy = policy_shape(recipe)
    except ValueError as error:
        obstacle = f"model.checkpoint: {error}"
    yield from islice(_refusals(recipe, policy), 1)
    least = recipe.learner.filters.min_speed_range
    if least and not any(isinstance(term, SpeedConfig) for term in recipe.reward.terms.values()):
        yield (
            f"learner.filters.min_speed_range is {least:g} and the reward has no term of kind speed; add "
            "reward.terms.fast='{kind: speed}', or take learner.filters.min_speed_range=0"
        )
    if recipe.sft.data is not None:
        try:
            read_demonstrations(recipe.sft.data)
        except ValueError as error:
            yield f"sft.data: {error}"
    yield from _package_and_transport_problems(recipe)
    if obstacle:
        yield obstacle
    if policy is None:
        return
    lora, engine = recipe.model.lora, recipe.rollout.engine
    yield from filter(None, (lora.incompatibility(policy), recipe.sharding.incompatibility(policy, lora)))
    if refusal := engine.incompatibility(policy):
        yield f"rollout.engine.{refusal}"


def _package_and_transport_problems(recipe: Recipe) -> Iterator[str]:
    """Report packages that a field of the recipe needs, and weight transports that have nothing to go over."""
    transport, lora = recipe.weight_transport, recipe.model.lora
    for is_set, field, package, fix in (
        (recipe.wandb_project is not None, "wandb_project is set", "wandb", "'d1[wandb]', or leave it out"),
        (lora.base_weights == "nf4", "model.lora.base_weights is nf4", "bitsandbytes", "'d1[quantized]'"),
        (transport == "nixl", "weight_transport is nixl", "nixl", "nixl, or leave it out"),
    ):
        if is_set and find_spec(package) is None:
            yield f"{field} and the package {package} is missing; pip install {fix}"
    if transport != OBJECT_STORE and lora.rank:
        yield f"weight_transport is {transport}, and an adapter goes through the object store; leave it out"
    if transport == "cuda_ipc" and needs_of(recipe).gpus != 1:
        yield (
            "weight_transport is cuda_ipc, which reaches processes on the same GPU alone, and this recipe's are not on "
            "one; take nixl, or leave it out"
        )
