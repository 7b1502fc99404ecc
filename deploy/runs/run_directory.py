"""Making a run directory: the resolved recipe and policy version 0, whole or not at all."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from actors.checkpoints.selection import Position
from actors.plan import RunPlan
from actors.run_config import RunConfig
from actors.run_log import CHECKPOINTS, RECIPE
from actors.spec import Phase, RunSpec
from actors.training.sft_data import load_sft_data
from deploy.errors import UserError
from deploy.recipe.overrides import load_recipe, resolved_yaml
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.lock import LOCK, RunLock
from learner.model.checkpoint_files import load_config
from learner.model.hub import find_checkpoint, find_tokenizer
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from rewards import Split, make_task
from rewards.data.demonstrations import read_demonstrations
from rewards.data.draw import TooFewProblemsError

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.transformer import Transformer

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


def make_spec(recipe: Recipe, stages: Stages) -> RunSpec:
    """The run that a recipe describes."""
    phases = _PHASES[stages]
    if stages is Stages.ALL and recipe.control.enabled:
        phases = (*phases, Phase.CONTROL)
    config = {name: getattr(recipe, name) for name in RunConfig.model_fields}
    config["reward"] = recipe.reward.resolved()
    config["sft"] = recipe.sft.model_copy(update={"data": recipe.sft.data and recipe.sft.data.resolve()})
    return RunSpec(**config, run_dir=recipe.run_dir, phases=phases)


def create_run_dir(recipe: Recipe, spec: RunSpec, start_from: Path | None) -> RunLock:
    """Make the run directory, with policy version 0 made from scratch or copied from `start_from`; returns its lock.

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
        _fill_run_dir(recipe, spec, start_from, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        lock.close()
        raise
    return lock


def _fill_run_dir(recipe: Recipe, spec: RunSpec, start_from: Path | None, partial: Path) -> None:
    """Write into `partial`, and give it its name."""
    try:
        # Of a try that was killed.
        for path in [path for path in partial.iterdir() if path.name != LOCK]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (partial / RECIPE).write_text(resolved_yaml(recipe))
        reference = start_from or recipe.model.checkpoint
        if reference is not None:
            # Before its weights are fetched and copied.
            _check_plan(spec, ChatTokenizer(find_tokenizer(reference)))
        _write_initial(recipe, partial / CHECKPOINTS / "initial", _source(recipe, start_from))
        if reference is None:
            _check_plan(spec, ChatTokenizer(partial / CHECKPOINTS / "initial"))
        partial.rename(spec.run_dir)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise UserError(
                f"there already is a run {recipe.name} in {spec.run_dir.parent}; choose name=..."
            ) from error
        raise UserError(str(error)) from error


def check_resumable(recipe: Recipe, spec: RunSpec) -> None:
    """Raise UserError unless `recipe` goes on with the run that the directory began."""
    if not spec.initial_checkpoint.is_dir():
        raise UserError(f"there is no run to resume in {spec.run_dir}; start it without --resume")
    began = _flat(load_recipe(spec.run_dir / RECIPE, []).model_dump(mode="json"))
    now = _flat(recipe.model_dump(mode="json"))
    for key in {**now, **began}:
        may_change = key.startswith(_MAY_CHANGE) or _WHERE_A_TERM_ASKS.fullmatch(key)
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


def _source(recipe: Recipe, start_from: Path | None) -> Path | None:
    """The checkpoint to start from; None to start from scratch."""
    source = start_from or recipe.model.checkpoint
    return None if source is None else find_checkpoint(source)


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
            else:
                _check_canvas(recipe, find_checkpoint(reference, config_only=True))
                tokenizer = ChatTokenizer(find_tokenizer(reference))
            _check_plan(few, tokenizer)
    except TooFewProblemsError:
        return  # `preflight` says so, with the counts that the recipe has.
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_canvas(recipe: Recipe, source: Path) -> None:
    """Raise ValueError unless a checkpoint takes the recipe's canvases."""
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


def _write_initial(recipe: Recipe, directory: Path, source: Path | None) -> None:
    # These import torch, and those of `_save_initial` Ray: seconds, not to be spent where a recipe is only looked at.
    from learner.model.checkpoint import load_policy, stored_dtype
    from learner.model.networks import make_model
    from learner.model.transformer import init_weights

    if source is not None:
        _check_canvas(recipe, source)
        ChatTokenizer(source)
        # As it is: in float32 a checkpoint in bfloat16 would take twice the memory and the disk, and say the same.
        _save_initial(directory, load_policy(source, stored_dtype(source)), source)
        return
    tokenizer_dir = directory.parent / ".tokenizer"
    make_tokenizer(_texts(recipe), tokenizer_dir, recipe.model.vocab_size)
    tokenizer = ChatTokenizer(tokenizer_dir)
    ids = {"mask_token_id": tokenizer.token_id(MASK), "eos_token_id": tokenizer.token_id(EOS)}
    model = make_model(recipe.model.shape(len(tokenizer), recipe.longest_canvas, **ids))
    init_weights(model, recipe.seed, recipe.model.init_scale)
    _save_initial(directory, model, tokenizer_dir)
    shutil.rmtree(tokenizer_dir)


def _save_initial(directory: Path, model: Transformer, tokenizer_from: Path) -> None:
    from actors.weights.tensors import make_manifest
    from learner.model.checkpoint import save_checkpoint

    weights = dict(model.named_parameters())
    digest = make_manifest(0, _InFloat32(weights)).digest
    position = Position(phase=Phase.UNTRAINED, round=0, policy_version=0, rl_seconds=0.0, manifest_digest=digest)
    save_checkpoint(directory, model.config, weights, tokenizer_from, trainer_state=asdict(position))


class _InFloat32(Mapping[str, "Tensor"]):
    """Weights as the learner, which computes in float32, will publish them: one at a time."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].detach().float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _texts(recipe: Recipe) -> list[str]:
    count = min(recipe.num_train_problems, _NUM_TOKENIZER_TEXTS)
    problems = make_task(recipe.task).problems(Split.TRAIN, count, recipe.seed)
    prompts = [message.content for problem in problems for message in problem.messages]
    texts = prompts + [problem.demonstration for problem in problems]
    if recipe.sft.data is not None:
        for demonstration in read_demonstrations(recipe.sft.data)[:_NUM_TOKENIZER_TEXTS]:
            texts += [*(message.content for message in demonstration.messages), demonstration.completion]
    return texts


def _check_plan(spec: RunSpec, tokenizer: ChatTokenizer) -> None:
    plan = RunPlan(spec, tokenizer)
    if Phase.SFT in spec.phases:
        load_sft_data(spec, plan, tokenizer)
