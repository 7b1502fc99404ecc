"""Atomic creation of a run directory: the resolved recipe and policy version 0."""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.checkpoints.selection import Position, is_intermediate
from actors.plan import RunPlan
from actors.run_config import RunConfig
from actors.run_log import CHECKPOINTS, RECIPE
from actors.spec import Phase, RunSpec
from actors.training.pairs import load_pairs
from actors.training.sft.data import load_sft_data
from deploy.errors import UserError, user_errors
from deploy.recipe.overrides import flat_fields, load_recipe, resolved_yaml
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.lock import LOCK, RunLock
from learner.model.checkpoint_files import has_adapter, load_config, open_tokenizer, tokenizer_directory
from learner.model.config import TransformerConfig
from learner.model.hub import find_checkpoint, find_tokenizer, is_hub_id
from learner.model.storage.references import check_unchanged
from learner.model.storage.throughput import ReportProgress
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from learner.objectives import DistillationConfig
from learner.objectives.distillation import teacher_incompatibility
from rewards import Split, make_task
from rewards.data.dataset import DataSources
from rewards.data.demonstrations import read_demonstrations
from rewards.data.sampling import TooFewProblemsError
from rewards.data.sources import absolute_source

_PHASES = {
    Stages.ALL: (Phase.SFT, Phase.RL),
    Stages.SFT: (Phase.SFT,),
    Stages.RL: (Phase.RL,),
}
# Fields that a resumed run may change: how long and where it runs, and what is recorded of it.
_MAY_CHANGE = (
    "runs_dir",
    "name",
    "gpus.",
    "placement.",
    "learner.num_rounds",
    "learner.num_workers",
    "learner.min_workers",
    "learner.resource_timeout_s",
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
# The same for a reward term: where, how often and with which timeout it is queried, not for what.
_WHERE_A_TERM_ASKS = re.compile(
    r"reward\.terms\.\w+\.(directory|url|token_env|batch_size|base_url|api_key_env|timeout_s|num_tries|max_concurrency"
    r"|max_response_bytes|requests_per_minute|cache_path|cache_redis_env|vllm.*)"
)
_NUM_TOKENIZER_TEXTS = 2000


def make_spec(recipe: Recipe, stages: Stages) -> RunSpec:
    """Build the specification of the run that a recipe describes."""
    phases = _PHASES[stages]
    if stages is Stages.ALL and recipe.control.enabled:
        phases = (*phases, Phase.CONTROL)
    recipe = _of_any_directory(recipe)
    config = {name: getattr(recipe, name) for name in RunConfig.model_fields}
    config["reward"] = recipe.reward.resolved()
    return RunSpec(**config, run_dir=recipe.run_dir, phases=phases)


def _of_any_directory(recipe: Recipe) -> Recipe:
    """Make the data paths of a recipe absolute, so that it can be read from another directory."""
    task = recipe.task.with_absolute_paths() if isinstance(recipe.task, DataSources) else recipe.task
    sft = recipe.sft.model_copy(update={"data": recipe.sft.data and absolute_source(recipe.sft.data)})
    learner = recipe.learner
    learner = learner.model_copy(update={"pairs": learner.pairs and absolute_source(learner.pairs)})
    if isinstance(learner.objective, DistillationConfig) and learner.objective.teacher is not None:
        objective = learner.objective.model_copy(update={"teacher": learner.objective.teacher.absolute()})
        learner = learner.model_copy(update={"objective": objective})
    return recipe.model_copy(update={"task": task, "sft": sft, "learner": learner})


def scratch_policy(run_dir: Path) -> Path:
    """Return where to write a policy that becomes version 0 of a future run; creating the run deletes it."""
    return run_dir.with_name(f".{run_dir.name}.policy")


def create_run_dir(
    recipe: Recipe, spec: RunSpec, start_from: Path | None, say: ReportProgress | None = None
) -> RunLock:
    """Create the run directory with policy version 0, and return its lock. `say` reports slow steps.

    Version 0 is `start_from`, else the recipe's checkpoint, else made from scratch.

    Raises UserError if the recipe cannot work (a bad checkpoint, too few problems, too short a canvas), or if another
    process creates or has created the run.
    """
    partial = spec.run_dir.with_name(f".{spec.run_dir.name}.partial")
    with user_errors(OSError):
        partial.mkdir(parents=True, exist_ok=True)
    # The lock moves with the directory, so that the run is never there unlocked.
    lock = RunLock.take(partial)
    try:
        _fill_run_dir(recipe, spec, start_from, partial, say)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        lock.close()
        raise
    return lock


def _fill_run_dir(
    recipe: Recipe, spec: RunSpec, start_from: Path | None, partial: Path, say: ReportProgress | None
) -> None:
    """Fill `partial`, then rename it to the run directory."""
    try:
        # Left by an attempt that was killed.
        for path in [path for path in partial.iterdir() if path.name != LOCK]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (partial / RECIPE).write_text(resolved_yaml(_of_any_directory(recipe)))
        reference = start_from or recipe.model.checkpoint
        if reference is not None:
            # Checked before its weights are downloaded and hashed.
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
    """Raise UserError unless `recipe` can resume the run in its directory, and the initial weights are unchanged."""
    if not spec.initial_checkpoint.is_dir():
        raise UserError(f"there is no run to resume in {spec.run_dir}; start it without --resume")
    with user_errors(ValueError):
        check_unchanged(spec.initial_checkpoint)
        _check_pairs(spec)
    began, now = (
        flat_fields(_of_any_directory(one).model_dump(mode="json"))
        for one in (load_recipe(spec.run_dir / RECIPE, []), recipe)
    )
    for key in {**now, **began}:
        # The run's own initial checkpoint moves with it.
        is_own = key == "model.checkpoint" and now[key] == str(spec.initial_checkpoint)
        may_change = key.startswith(_MAY_CHANGE) or _WHERE_A_TERM_ASKS.fullmatch(key) or is_own
        if began.get(key) != now.get(key) and not may_change:
            raise UserError(
                f"{key} is {now.get(key)} and the run in {spec.run_dir} began with {began.get(key)}; "
                "resume with that, or start a run of another name"
            )


def check_creatable(recipe: Recipe, spec: RunSpec, start_from: Path | None, max_problems: int) -> None:
    """Raise UserError where `create_run_dir` would because of the recipe. Writes only temporary files.

    At most `max_problems` of a split are checked, and only the config and tokenizer of a hub model.
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
        return  # `preflight` reports it, with the recipe's own counts.
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_canvas(recipe: Recipe, source: Path) -> TransformerConfig:
    """Return the shape of a checkpoint. Raises ValueError if the recipe's canvases are too long for it."""
    config, rollout = load_config(source), recipe.rollout
    most = config.max_sequence_length
    num_slots = rollout.sampling.max_slots(is_block_causal=config.is_block_causal)
    wanted = {
        "sft.max_tokens": recipe.sft_tokens,
        "rollout.max_prompt_tokens + rollout.sampling.gen_length": rollout.max_prompt_tokens + num_slots,
    }
    for field, tokens in wanted.items():
        if most < tokens:
            raise ValueError(f"{source} takes canvases of {most} tokens; {field} is {tokens}")
    return config


def _write_initial(recipe: Recipe, directory: Path, reference: str | Path | None, say: ReportProgress | None) -> None:
    # These import torch and Ray, which takes seconds that checking a recipe should not cost.
    from actors.weights.tensors import float32_digest
    from learner.model.checkpoint import load_merged, load_weights, save_checkpoint
    from learner.model.networks import make_model
    from learner.model.storage.weights import StoredWeights
    from learner.model.transformer import Transformer, init_weights

    def save(model: Transformer, tokenizer_source: Path) -> None:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        state = asdict(_at_the_start(float32_digest(weights, say)))
        save_checkpoint(directory, model.config, weights, tokenizer_source, trainer_state=state)

    if reference is not None:
        source = find_checkpoint(reference)
        open_tokenizer(source)
        if has_adapter(source):
            save(load_merged(source, say), tokenizer_directory(source))
            return
        stored = StoredWeights(source)
        state = asdict(_at_the_start(float32_digest(stored, say)))
        is_scratch = source == scratch_policy(recipe.run_dir)
        if is_scratch or _stays(reference, source):
            save_checkpoint(
                directory, stored.config, stored, source, trainer_state=state, link_own_files=is_scratch, report=say
            )
        else:
            # In its own precision: float32 would double the memory and disk of bfloat16 weights, without any gain.
            whole = dict(load_weights(source, stored.dtype, report=say).named_parameters())
            save_checkpoint(directory, stored.config, whole, source, trainer_state=state)
        return
    tokenizer_dir = directory.parent / ".tokenizer"
    make_tokenizer(_texts(recipe), tokenizer_dir, recipe.model.vocab_size)
    tokenizer = ChatTokenizer(tokenizer_dir)
    model = make_model(_shape_of(recipe, tokenizer))
    init_weights(model, recipe.seed, recipe.model.init_scale)
    save(model, tokenizer_dir)
    shutil.rmtree(tokenizer_dir)


def _shape_of(recipe: Recipe, tokenizer: ChatTokenizer) -> TransformerConfig:
    """Return the shape of a policy made from scratch."""
    ids = {"mask_token_id": tokenizer.token_id(MASK), "eos_token_id": tokenizer.token_id(EOS)}
    return recipe.model.shape(len(tokenizer), recipe.longest_canvas, **ids)


def _stays(reference: str | Path, source: Path) -> bool:
    """Whether a checkpoint's weight files can be referenced in place for as long as the run exists.

    They cannot if a run may delete them, or if they are from the hub and other machines of a cluster lack the download.
    """
    if is_intermediate(source):
        return False
    return not (is_hub_id(reference) and "RAY_ADDRESS" in os.environ)


def _at_the_start(digest: str) -> Position:
    return Position(phase=Phase.UNTRAINED, round=0, policy_version=0, rl_seconds=0.0, manifest_digest=digest)


def _texts(recipe: Recipe) -> list[str]:
    count = min(recipe.num_train_problems, _NUM_TOKENIZER_TEXTS)
    problems = make_task(recipe.task).problems(Split.TRAIN, count, recipe.seed)
    prompts = [message.content for problem in problems for message in problem.messages]
    texts = prompts + [problem.reference_completion for problem in problems]
    if recipe.sft.data is not None:
        for demonstration in read_demonstrations(recipe.sft.data)[:_NUM_TOKENIZER_TEXTS]:
            texts += [*(message.content for message in demonstration.messages), demonstration.completion]
    return texts


def _check_plan(spec: RunSpec, tokenizer: ChatTokenizer, policy: TransformerConfig) -> None:
    plan = RunPlan(spec, tokenizer)
    for params in spec.evaluation.params(spec.rollout.sampling):
        plan.evaluation_work_units(params, policy)
    plan.evaluation_work_units(spec.evaluation.params(spec.rollout.sampling)[0], policy, problems=plan.validation)
    if Phase.SFT in spec.phases:
        load_sft_data(spec, plan, tokenizer)
    _check_pairs(spec, tokenizer)
    objective = spec.learner.objective
    if Phase.RL in spec.phases and isinstance(objective, DistillationConfig) and objective.needs_teacher:
        _check_teacher(spec, objective.teacher, policy)


def _check_pairs(spec: RunSpec, tokenizer: ChatTokenizer | None = None) -> None:
    """Raise ValueError unless the rounds can train on the recipe's stored pairs, if it has any."""
    if Phase.RL in spec.phases and spec.learner.pairs is not None:
        load_pairs(spec, tokenizer or ChatTokenizer(spec.initial_checkpoint))


def _check_teacher(spec: RunSpec, directory: Path | None, policy: TransformerConfig) -> None:
    """Raise ValueError unless the policy can be distilled from its teacher: a checkpoint, or the policy itself."""
    try:
        teacher = policy if directory is None else load_config(directory)
    except ValueError as error:
        raise ValueError(f"learner.objective.teacher: {error}") from None
    if directory is not None and has_adapter(directory):
        raise ValueError(f"learner.objective.teacher {directory} is an adapter; take what `d1 export` makes of it")
    if refusal := teacher_incompatibility(teacher, policy, spec.canvas_tokens):
        named = "is null, and the policy that the run starts from" if directory is None else str(directory)
        raise ValueError(f"learner.objective.teacher {named} {refusal}")
