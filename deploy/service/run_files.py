"""What the service takes from a run directory, and from where it takes weights."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from pydantic import ValidationError

from actors.registry import PolicyVersion
from actors.run_log import CHECKPOINTS, RECIPE, read_events
from actors.spec import Phase
from deploy.errors import UserError
from deploy.recipe import Recipe
from learner.model.checkpoint import load_config, load_policy
from learner.model.families import make_model
from rollout.config import EngineConfig
from rollout.sampler import Sampler

_FETCH_TIMEOUT_S = 120.0


def read_recipe(run_dir: Path) -> Recipe:
    """The resolved recipe of a run. Raises UserError when the directory is no run."""
    path = run_dir / RECIPE
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run: it has no {RECIPE}")
    try:
        return Recipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not a recipe of this d1: {error}") from error


def latest_checkpoint(run_dir: Path) -> PolicyVersion:
    """The checkpoint with the highest policy version, with its held-out score if it has one.

    The control's does not count: it is trained to compare with, not to be served. Raises UserError without any.
    """
    found = []
    for path in (run_dir / CHECKPOINTS).glob("*/trainer_state.json"):
        # A directory whose name begins with a dot is one that is still being written.
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["phase"] != Phase.CONTROL and not path.parent.name.startswith("."):
            found.append((state["policy_version"], path.parent, state))
    if not found:
        raise UserError(f"{run_dir} has no checkpoint to serve yet")
    version, directory, state = max(found, key=lambda item: item[0])
    scores = [
        event for event in read_events(run_dir) if event["event"] == "evaluation" and event["policy_version"] == version
    ]
    return PolicyVersion(
        version=version,
        round=state["round"],
        phase=state["phase"],
        num_correct=scores[-1]["num_correct"] if scores else None,
        num_problems=scores[-1]["num_problems"] if scores else None,
        checkpoint=str(directory),
        weight_store=None,
        manifest_digest=None,
    )


def load_sampler(policy: PolicyVersion, config_dir: Path, engine: EngineConfig) -> Sampler:
    """The sampler of an announced version: from its weight store, or else from its checkpoint.

    Args:
        policy: the version.
        config_dir: a checkpoint directory of the same run, for the policy's shape: a store holds tensors only.
        engine: how the run's samplers compute.

    Raises:
        LookupError: neither the store nor a checkpoint has it. The store may have moved on to newer versions.
        TimeoutError: the store did not answer.
        ValueError: what came is damaged or of another shape.
    """
    if policy.weight_store is not None:
        # Ray is not imported where only checkpoints are served.
        from actors.weights import fetch

        try:
            weights = fetch(policy.weight_store, policy.version, _FETCH_TIMEOUT_S)
        except LookupError:
            if policy.checkpoint is None:
                raise
        else:
            import torch

            with torch.device("meta"):
                model = make_model(load_config(config_dir))
            model.load_state_dict(
                {name: tensor.to(engine.torch_dtype) for name, tensor in weights.items()}, assign=True
            )
            return Sampler(model, policy.version, engine)
    if policy.checkpoint is None:
        raise LookupError(f"policy version {policy.version} was announced without a store or a checkpoint")
    return Sampler(load_policy(Path(policy.checkpoint), engine.torch_dtype), policy.version, engine)
