"""Loading a policy version: from its weight store, or else from its checkpoint, verified."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from actors.checkpoints.selection import find_position, read_position
from actors.registry.records import PolicyVersion
from deploy.service.engine.loaded_version import AnySampler
from learner.model.checkpoint import load_policy
from learner.model.checkpoint_files import MANIFEST, load_config, verify_checkpoint
from learner.model.networks import held_dtypes, make_on_meta
from learner.model.renoising.config import is_renoising
from learner.model.renoising.policy import load_renoising_policy
from rollout.config import EngineConfig
from rollout.renoising.sampler import RenoisingSampler
from rollout.sampler import Sampler

_FETCH_TIMEOUT_S = 120.0


def load_sampler(
    policy: PolicyVersion, config_dir: Path, engine: EngineConfig, device: str | torch.device = "cpu"
) -> AnySampler:
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
        from actors.weights.fetching import fetch

        try:
            weights = fetch(policy.weight_store, policy.version, _FETCH_TIMEOUT_S, policy.manifest_digest)
        except LookupError:
            if policy.checkpoint is None:
                raise
        else:
            config = load_config(config_dir)
            model, held = make_on_meta(config), held_dtypes(config, engine.torch_dtype)
            model.load_state_dict(
                {name: tensor.to(held.get(name, engine.torch_dtype)) for name, tensor in weights.items()}, assign=True
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
    if is_renoising(directory):
        return RenoisingSampler(load_renoising_policy(directory, engine.torch_dtype).to(device), policy.version)
    return Sampler(load_policy(directory, engine.torch_dtype).to(device), policy.version, engine)


def _verify(policy: PolicyVersion, directory: Path) -> None:
    """Raise ValueError where a checkpoint is damaged, or holds other weights than those that were announced."""
    has_manifest = (directory / MANIFEST).is_file()
    if policy.manifest_digest is None and not has_manifest and find_position(directory) is None:
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
    from actors.weights.tensors import make_manifest

    return make_manifest(0, dict(load_policy(directory).named_parameters())).digest
