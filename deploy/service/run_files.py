"""What the service takes from a run directory, and from where it takes weights."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import structlog
import yaml
from pydantic import ValidationError

from actors.registry.registry import PolicyVersion
from actors.run_log import CHECKPOINTS, RECIPE, read_events
from actors.spec import Phase
from actors.training.checkpoints import (
    STATE,
    FoundCheckpoint,
    Position,
    checkpoints_to_answer,
    newest_checkpoint,
    read_position,
    to_answer,
)
from deploy.errors import UserError
from deploy.printing import printable
from deploy.recipe.recipe import Recipe
from deploy.service.contract import BASE
from learner.model.checkpoint import MANIFEST, load_config, load_policy, verify_checkpoint
from learner.model.families import make_model
from rollout.config import EngineConfig
from rollout.sampler import Sampler

_FETCH_TIMEOUT_S = 120.0
_REMEMBERED_S = 5.0


def read_recipe(run_dir: Path) -> Recipe:
    """The resolved recipe of a run. Raises UserError when the directory is no run."""
    path = run_dir / RECIPE
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run: it has no {RECIPE}")
    try:
        return Recipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not a recipe of this d1: {error}") from error


def newest_to_answer(run_dir: Path) -> FoundCheckpoint:
    """The newest whole checkpoint that a run's service answers from; what is damaged is said on stderr.

    Raises UserError when there is none.
    """
    try:
        found = newest_checkpoint(run_dir / CHECKPOINTS, to_answer)
    except ValueError as error:
        raise UserError(str(error)) from error
    if found is None:
        raise UserError(f"{run_dir} has no checkpoint to serve yet")
    for what in found.passed_over:
        sys.stderr.write(f"d1: {printable(what)}\n")
    return found


def _version_of(position: Position, directory: Path, run_dir: Path) -> PolicyVersion:
    scores = [
        event
        for event in read_events(run_dir)
        if event["event"] == "evaluation" and event["policy_version"] == position.policy_version
    ]
    return PolicyVersion(
        version=position.policy_version,
        round=position.round,
        phase=position.phase,
        num_correct=scores[-1]["num_correct"] if scores else None,
        num_problems=scores[-1]["num_problems"] if scores else None,
        checkpoint=str(directory),
        weight_store=None,
        manifest_digest=position.manifest_digest,
    )


class Checkpoints:
    """The checkpoints of a run, looked for by what a request wants."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._found: dict[str | int, tuple[float, PolicyVersion | None]] = {}

    def locate(self, wanted: str | int) -> PolicyVersion | None:
        """The checkpoint of `base` or of a version, as it was seconds ago; None where there is none.

        `base` is what the rounds began with: the newest checkpoint before them.
        """
        looked_at, found = self._found.get(wanted, (-math.inf, None))
        if time.monotonic() - looked_at > _REMEMBERED_S:
            found = self._look_for(wanted)
            # Versions that were asked for and are nowhere do not add up.
            self._found = {BASE: self._found[BASE]} if BASE in self._found else {}
            self._found[wanted] = time.monotonic(), found
        return found

    def _look_for(self, wanted: str | int) -> PolicyVersion | None:
        def is_wanted(position: Position) -> bool:
            if wanted == BASE:
                return position.phase in (Phase.UNTRAINED, Phase.SFT)
            return position.policy_version == wanted

        found = [one for one in checkpoints_to_answer(self._run_dir / CHECKPOINTS) if is_wanted(one[0])]
        return _version_of(*found[-1], self._run_dir) if found else None


def latest_checkpoint(run_dir: Path) -> PolicyVersion:
    """What `newest_to_answer` finds, with its held-out score if it has one. Raises UserError as that does."""
    found = newest_to_answer(run_dir)
    return _version_of(found.position, found.directory, run_dir)


def plain_checkpoint(directory: Path) -> PolicyVersion:
    """A checkpoint that is served by itself: the version that its run gave it, or 0."""
    position = read_position(directory) if (directory / STATE).is_file() else None
    return PolicyVersion(
        version=0 if position is None else position.policy_version,
        round=0 if position is None else position.round,
        phase="untrained" if position is None else position.phase,
        num_correct=None,
        num_problems=None,
        checkpoint=str(directory),
        weight_store=None,
        manifest_digest=None if position is None else position.manifest_digest,
    )


def load_sampler(policy: PolicyVersion, config_dir: Path, engine: EngineConfig, device: str = "cpu") -> Sampler:
    """The sampler of an announced version: from its weight store, or else from its checkpoint.

    Args:
        policy: the version.
        config_dir: a checkpoint directory of the same run, for the policy's shape: a store holds tensors only.
        engine: how the run's samplers compute.
        device: where it computes.

    Raises:
        LookupError: neither the store nor a checkpoint has it. The store may have moved on to newer versions.
        TimeoutError: the store did not answer.
        ValueError: what came is damaged, of another shape, or not the weights that were announced.
    """
    if policy.weight_store is not None:
        # Ray is not imported where only checkpoints are served.
        from actors.weights import fetch

        try:
            weights = fetch(policy.weight_store, policy.version, _FETCH_TIMEOUT_S, policy.manifest_digest)
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
            return Sampler(model.to(device), policy.version, engine)
    if policy.checkpoint is None:
        raise LookupError(f"policy version {policy.version} was announced without a store or a checkpoint")
    directory = Path(policy.checkpoint)
    if not directory.is_dir():
        raise LookupError(
            f"policy version {policy.version} should be in {directory}, and this machine has no such folder"
        )
    _verify(policy, directory)
    return Sampler(load_policy(directory, engine.torch_dtype).to(device), policy.version, engine)


def _verify(policy: PolicyVersion, directory: Path) -> None:
    """Raise ValueError where a checkpoint is damaged, or holds other weights than those that were announced."""
    if policy.manifest_digest is None and not any((directory / name).is_file() for name in (MANIFEST, STATE)):
        structlog.get_logger().warning("checkpoint_unverified", path=str(directory), why=f"it has no {MANIFEST}")
        return
    verify_checkpoint(directory)
    if policy.manifest_digest is None:
        return
    digest = read_position(directory).manifest_digest or _digest_of(directory)
    if digest != policy.manifest_digest:
        raise ValueError(
            f"{directory} holds other weights than were announced: their checksum is {digest[:12]}, and that was "
            f"{policy.manifest_digest[:12]}"
        )


def _digest_of(directory: Path) -> str:
    """Of a checkpoint that an earlier d1 wrote, the checksum that one of today says itself."""
    from actors.weights import make_manifest

    return make_manifest(0, dict(load_policy(directory).named_parameters())).digest
