"""Making a run directory: the resolved recipe and policy version 0, whole or not at all."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from actors.checkpoints.selection import Position, is_passing
from actors.plan import RunPlan
from actors.run_config import RunConfig
from actors.run_log import CHECKPOINTS, RECIPE
from actors.spec import Phase, RunSpec
from actors.training.sft.data import load_sft_data
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe, resolved_yaml
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.lock import LOCK, RunLock
from learner.model.checkpoint_files import has_adapter, load_config, open_tokenizer, tokenizer_directory
from learner.model.config import TransformerConfig
from learner.model.hub import find_checkpoint, find_tokenizer, is_hub_id
from learner.model.storage.references import check_unchanged
from learner.model.storage.throughput import Say, Throughput, num_threads
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from learner.objectives import DistillationConfig
from learner.objectives.distillation import teacher_refusal
from rewards import Split, make_task
from rewards.data.dataset import Files
from rewards.data.demonstrations import read_demonstrations
from rewards.data.draw import TooFewProblemsError
from rewards.data.sources import from_anywhere

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.storage.weights import StoredWeights

_PHASES = {
    Stages.ALL: (Phase.SFT, Phase.RL),
    Stages.SFT: (Phase.SFT,),
    Stages.RL: (Phase.RL,),
}
# What a resumed run may have otherwise: how long and where it runs, and what is written about it.
_MAY_CHANGE = (
    "runs_dir",
    "name",
    "gpus.",
    "placement.",
    "learner.num_rounds",
    "learner.num_workers",
    "sharding.activation_checkpointing",
    "sharding.cpu_offload",
    "sharding.workers_per_copy",
    "rollout.num_samplers",
    "rollout.timeout_s",
    "rollout.max_attempts",
    "grading.",
    "evaluation.every_rounds",
    "control.",
    "checkpoint_every_rounds",
    "checkpoint_every_s",
    "num_checkpoints_kept",
    "checkpoint_url",
    "service.",
    "wandb_project",
)
# The same of a term of the reward: where and how patiently it is asked, not what.
_WHERE_A_TERM_ASKS = re.compile(
    r"reward\.terms\.\w+\.(directory|url|token_env|batch_size|base_url|api_key_env|timeout_s|num_tries|max_concurrency"
    r"|max_response_bytes|requests_per_minute|cache_path|cache_redis_env|vllm.*)"
)
_NUM_TOKENIZER_TEXTS = 2000
_FLOAT_BYTES = 4
# Numbers of a tensor that are looked at at a time.
_LOOKED_AT = 1 << 20


def make_spec(recipe: Recipe, stages: Stages) -> RunSpec:
    """The run that a recipe describes."""
    phases = _PHASES[stages]
    if stages is Stages.ALL and recipe.control.enabled:
        phases = (*phases, Phase.CONTROL)
    recipe = _of_any_directory(recipe)
    config = {name: getattr(recipe, name) for name in RunConfig.model_fields}
    config["reward"] = recipe.reward.resolved()
    return RunSpec(**config, run_dir=recipe.run_dir, phases=phases)


def _of_any_directory(recipe: Recipe) -> Recipe:
    """The recipe with the paths of its data absolute, for who reads it in another directory."""
    task = recipe.task.from_anywhere() if isinstance(recipe.task, Files) else recipe.task
    sft = recipe.sft.model_copy(update={"data": recipe.sft.data and from_anywhere(recipe.sft.data)})
    learner = recipe.learner
    if isinstance(learner.objective, DistillationConfig) and learner.objective.teacher is not None:
        objective = learner.objective.model_copy(update={"teacher": learner.objective.teacher.absolute()})
        learner = learner.model_copy(update={"objective": objective})
    return recipe.model_copy(update={"task": task, "sft": sft, "learner": learner})


def scratch_policy(run_dir: Path) -> Path:
    """Where a policy is written that becomes version 0 of a run which is not there yet; it goes when that is."""
    return run_dir.with_name(f".{run_dir.name}.policy")


def create_run_dir(recipe: Recipe, spec: RunSpec, start_from: Path | None, say: Say | None = None) -> RunLock:
    """Make the run directory, with policy version 0 made from scratch or that of a checkpoint, `start_from` or the
    recipe's; returns its lock. `say` is told what takes long.

    Raises UserError when the recipe cannot work: a bad checkpoint, too few problems, a canvas that is too short; and
    when another process makes or has made the run.
    """
    partial = spec.run_dir.with_name(f".{spec.run_dir.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(str(error)) from error
    # It moves with the directory: there is no moment at which the run is there and nobody has its lock.
    lock = RunLock.take(partial)
    try:
        _fill_run_dir(recipe, spec, start_from, partial, say)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        lock.close()
        raise
    return lock


def _fill_run_dir(recipe: Recipe, spec: RunSpec, start_from: Path | None, partial: Path, say: Say | None) -> None:
    """Write into `partial`, and give it its name."""
    try:
        # Of a try that was killed.
        for path in [path for path in partial.iterdir() if path.name != LOCK]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (partial / RECIPE).write_text(resolved_yaml(_of_any_directory(recipe)))
        reference = start_from or recipe.model.checkpoint
        if reference is not None:
            # Before its weights are fetched and hashed.
            policy = _check_canvas(recipe, find_checkpoint(reference, config_only=True))
            _check_plan(spec, open_tokenizer(find_tokenizer(reference)), policy)
        _write_initial(recipe, partial / CHECKPOINTS / "initial", reference, say)
        if reference is None:
            initial = partial / CHECKPOINTS / "initial"
            _check_plan(spec, ChatTokenizer(initial), load_config(initial))
        partial.rename(spec.run_dir)
        shutil.rmtree(scratch_policy(spec.run_dir), ignore_errors=True)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise UserError(
                f"there already is a run {recipe.name} in {spec.run_dir.parent}; choose name=..."
            ) from error
        raise UserError(str(error)) from error


def check_resumable(recipe: Recipe, spec: RunSpec) -> None:
    """Raise UserError unless `recipe` goes on with the run that the directory began, and its weights are there."""
    if not spec.initial_checkpoint.is_dir():
        raise UserError(f"there is no run to resume in {spec.run_dir}; start it without --resume")
    try:
        check_unchanged(spec.initial_checkpoint)
    except ValueError as error:
        raise UserError(str(error)) from error
    began, now = (
        _flat(_of_any_directory(one).model_dump(mode="json"))
        for one in (load_recipe(spec.run_dir / RECIPE, []), recipe)
    )
    for key in {**now, **began}:
        # The run's own checkpoint has moved with it.
        is_own = key == "model.checkpoint" and now[key] == str(spec.initial_checkpoint)
        may_change = key.startswith(_MAY_CHANGE) or _WHERE_A_TERM_ASKS.fullmatch(key) or is_own
        if began.get(key) != now.get(key) and not may_change:
            raise UserError(
                f"{key} is {now.get(key)} and the run in {spec.run_dir} began with {began.get(key)}; "
                "resume with that, or start a run of another name"
            )


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def check_creatable(recipe: Recipe, spec: RunSpec, start_from: Path | None, max_problems: int) -> None:
    """Raise UserError where `create_run_dir` would for what the recipe says, with nothing written but a scratch file.

    Of a split no more than `max_problems` are looked at, of a model of the hub its config and its tokenizer.
    """
    asked = {name: min(getattr(spec.evaluation, name), max_problems) for name in ("num_problems", "num_validation")}
    evaluation = spec.evaluation.model_copy(update=asked)
    num_problems = min(spec.num_train_problems, max_problems)
    few = spec.model_copy(update={"num_train_problems": num_problems, "evaluation": evaluation})
    reference = start_from or recipe.model.checkpoint
    try:
        with TemporaryDirectory(prefix="d1-") as scratch:
            if reference is None:
                make_tokenizer(_texts(recipe), Path(scratch), recipe.model.vocab_size)
                tokenizer = ChatTokenizer(Path(scratch))
                policy = _shape_of(recipe, tokenizer)
            else:
                policy = _check_canvas(recipe, find_checkpoint(reference, config_only=True))
                tokenizer = open_tokenizer(find_tokenizer(reference))
            _check_plan(few, tokenizer, policy)
    except TooFewProblemsError:
        return  # `preflight` says so, with the counts that the recipe has.
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_canvas(recipe: Recipe, source: Path) -> TransformerConfig:
    """The shape of a checkpoint. Raises ValueError unless it takes the recipe's canvases."""
    config, rollout = load_config(source), recipe.rollout
    most = config.max_sequence_length
    num_slots = rollout.sampling.most_slots(is_block_causal=config.is_block_causal)
    wanted = {
        "sft.max_tokens": recipe.sft_tokens,
        "rollout.max_prompt_tokens + rollout.sampling.gen_length": rollout.max_prompt_tokens + num_slots,
    }
    for field, tokens in wanted.items():
        if most < tokens:
            raise ValueError(f"{source} takes canvases of {most} tokens; {field} is {tokens}")
    return config


def _write_initial(recipe: Recipe, directory: Path, reference: str | Path | None, say: Say | None) -> None:
    # These import torch, and those of `_digest` Ray: seconds, not to be spent where a recipe is only looked at.
    from learner.model.checkpoint import load_merged, load_weights, save_checkpoint
    from learner.model.networks import make_model
    from learner.model.storage.weights import StoredWeights
    from learner.model.transformer import init_weights

    if reference is not None:
        source = find_checkpoint(reference)
        _check_canvas(recipe, source)
        open_tokenizer(source)
        if has_adapter(source):
            merged = load_merged(source, say)
            weights = {name: parameter.detach() for name, parameter in merged.named_parameters()}
            state = asdict(_at_the_start(_digest(weights, say)))
            save_checkpoint(directory, merged.config, weights, tokenizer_directory(source), trainer_state=state)
            return
        stored = StoredWeights(source)
        state = asdict(_at_the_start(_digest(stored, say)))
        is_scratch = source == scratch_policy(recipe.run_dir)
        if is_scratch or _stays(reference, source):
            save_checkpoint(
                directory, stored.config, stored, source, trainer_state=state, takes_files=is_scratch, say=say
            )
        else:
            # As it is: in float32 one in bfloat16 would take twice the memory and the disk, and say the same.
            whole = dict(load_weights(source, stored.dtype, say=say).named_parameters())
            save_checkpoint(directory, stored.config, whole, source, trainer_state=state)
        return
    tokenizer_dir = directory.parent / ".tokenizer"
    make_tokenizer(_texts(recipe), tokenizer_dir, recipe.model.vocab_size)
    tokenizer = ChatTokenizer(tokenizer_dir)
    model = make_model(_shape_of(recipe, tokenizer))
    init_weights(model, recipe.seed, recipe.model.init_scale)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = asdict(_at_the_start(_digest(weights, say)))
    save_checkpoint(directory, model.config, weights, tokenizer_dir, trainer_state=state)
    shutil.rmtree(tokenizer_dir)


def _shape_of(recipe: Recipe, tokenizer: ChatTokenizer) -> TransformerConfig:
    """The shape of a policy that begins from scratch."""
    ids = {"mask_token_id": tokenizer.token_id(MASK), "eos_token_id": tokenizer.token_id(EOS)}
    return recipe.model.shape(len(tokenizer), recipe.longest_canvas, **ids)


def _stays(reference: str | Path, source: Path) -> bool:
    """Whether the weight files of a checkpoint can be referred to where they are, for as long as the run is.

    Not where a run may delete them. What is fetched from the hub is on this
    machine alone, and a cluster may have others.
    """
    if is_passing(source):
        return False
    return not (is_hub_id(reference) and "RAY_ADDRESS" in os.environ)


def _at_the_start(digest: str) -> Position:
    return Position(phase=Phase.UNTRAINED, round=0, policy_version=0, rl_seconds=0.0, manifest_digest=digest)


def _digest(weights: Mapping[str, Tensor] | StoredWeights, say: Say | None) -> str:
    """The digest of weights as the learner, which computes in float32, will publish them."""
    import torch

    from actors.weights.checksums import Checked, checked, joined
    from actors.weights.tensors import as_bytes, manifest_of_shards

    shapes = {name: tuple(weights[name].shape) for name in weights}
    num_bytes = _FLOAT_BYTES * sum(map(math.prod, shapes.values()))
    progress = Throughput("computing the checksum of version 0", num_bytes, say)

    def check(name: str) -> Checked:
        shape, tensor = shapes[name], weights[name]
        step = max(1, _LOOKED_AT // math.prod(shape[1:]))
        found = []
        for begin in range(0, shape[0], step):
            rows = as_bytes(tensor[begin : begin + step].float())
            found.append(checked([rows]))
            progress.add(rows.nbytes)
        return joined(found)

    with ThreadPoolExecutor(num_threads()) as threads:
        found = dict(zip(shapes, threads.map(check, shapes), strict=True))
    return manifest_of_shards(0, shapes, dict.fromkeys(shapes, torch.float32), [found]).digest


def _texts(recipe: Recipe) -> list[str]:
    count = min(recipe.num_train_problems, _NUM_TOKENIZER_TEXTS)
    problems = make_task(recipe.task).problems(Split.TRAIN, count, recipe.seed)
    prompts = [message.content for problem in problems for message in problem.messages]
    texts = prompts + [problem.demonstration for problem in problems]
    if recipe.sft.data is not None:
        for demonstration in read_demonstrations(recipe.sft.data)[:_NUM_TOKENIZER_TEXTS]:
            texts += [*(message.content for message in demonstration.messages), demonstration.completion]
    return texts


def _check_plan(spec: RunSpec, tokenizer: ChatTokenizer, policy: TransformerConfig) -> None:
    plan = RunPlan(spec, tokenizer)
    for params in spec.evaluation.params(spec.rollout.sampling):
        plan.evaluation_portions(params, policy)
    plan.evaluation_portions(spec.evaluation.params(spec.rollout.sampling)[0], policy, asked=plan.validation)
    if Phase.SFT in spec.phases:
        load_sft_data(spec, plan, tokenizer)
    if Phase.RL in spec.phases and isinstance(spec.learner.objective, DistillationConfig):
        _check_teacher(spec, spec.learner.objective.teacher, policy)


def _check_teacher(spec: RunSpec, directory: Path | None, policy: TransformerConfig) -> None:
    """Raise ValueError unless the policy can learn from its teacher, which is a checkpoint or the policy itself."""
    try:
        teacher = policy if directory is None else load_config(directory)
    except ValueError as error:
        raise ValueError(f"learner.objective.teacher: {error}") from None
    if directory is not None and has_adapter(directory):
        raise ValueError(f"learner.objective.teacher {directory} is an adapter; take what `d1 export` makes of it")
    if refusal := teacher_refusal(teacher, policy, spec.canvas_tokens):
        named = "is null, and the policy that the run starts from" if directory is None else str(directory)
        raise ValueError(f"learner.objective.teacher {named} {refusal}")
