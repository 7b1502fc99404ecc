"""Version loader: creates the sampler of a policy version from its weight store, or else from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

import structlog
import torch
from torch import Tensor

from actors.checkpoints.selection import find_position, read_position
from actors.registry.records import PolicyVersion
from learner.hardware import indexed_device
from learner.model.adapter import attach_adapters, read_adapter, read_chain
from learner.model.checkpoint import load_policy, load_weights
from learner.model.checkpoint_files import (
    ADAPTER,
    MANIFEST,
    BaseCheckpoint,
    adapter_base,
    chain_digest,
    checkpoint_chain,
    load_config,
    verify_own_files,
)
from learner.model.lora import copy_sharing_base, remove_adapters, set_adapter
from learner.model.lora_config import BaseWeights
from learner.model.networks import make_meta_model, parameter_dtypes
from learner.model.renoising.config import is_renoising
from learner.model.renoising.policy import load_renoising_policy
from learner.model.storage.references import missing_message, read_references
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.renoising.sampler import AnySampler, RenoisingSampler
from rollout.sampler import Sampler

_FETCH_TIMEOUT_S = 120.0
Weights = tuple[str, BaseWeights]
"""Identity of frozen weights: the digest of their checkpoint, and their precision (full or 4 bits)."""


class VersionLoader:
    """Loader of announced versions. Under LoRA all versions share the frozen weights."""

    def __init__(self, config_dir: Path, engine: EngineConfig, device: str | torch.device = "cpu") -> None:
        """Create a loader.

        Args:
            config_dir: any checkpoint of the run, for the model config: a weight store holds tensors only.
            engine: settings of the sampling engine.
            device: device of the samplers.
        """
        self._config_dir, self._engine, self._device = config_dir, engine, indexed_device(device)
        self._loaded: list[_Loaded] = []

    def load(self, policy: PolicyVersion) -> AnySampler:
        """Load the sampler of a version.

        Raises:
            LookupError: neither its store nor a checkpoint has the weights; a store drops old versions.
            TimeoutError: the store did not answer.
            ValueError: the weights are damaged, of another shape, or not those that were announced.
        """
        if policy.weight_store is not None:
            try:
                return Sampler(self._from_store(policy.weight_store, policy), policy.version, self._engine)
            except LookupError:
                if policy.checkpoint is None:
                    raise
        if policy.checkpoint is None:
            raise LookupError(f"policy version {policy.version} was announced without a store or a checkpoint")
        directory = Path(policy.checkpoint)
        if not directory.is_dir():
            raise LookupError(
                f"policy version {policy.version} should be in {directory}, and this machine has no such folder"
            )
        return self._from_checkpoint(directory, policy)

    def _from_store(self, store: str, policy: PolicyVersion) -> Transformer:
        # Imported here because a single checkpoint is served without Ray's object store.
        from actors.weights.fetching import open_store

        manifest, weights = open_store(store, _FETCH_TIMEOUT_S).version(policy.version, policy.manifest_digest)
        if manifest.base is not None:
            return self._beside(manifest.base, self._config_dir.parent, weights)
        config, dtype = load_config(self._config_dir), self._engine.torch_dtype
        model, held = make_meta_model(config), parameter_dtypes(config, dtype)
        cast = {name: tensor.to(held.get(name, dtype)) for name, tensor in weights.items()}
        model.load_state_dict(cast, assign=True)
        return model.to(self._device)

    def _from_checkpoint(self, directory: Path, policy: PolicyVersion) -> AnySampler:
        _verify(policy, directory)
        dtype = self._engine.torch_dtype
        if is_renoising(directory):
            return RenoisingSampler(load_renoising_policy(directory, dtype).to(self._device), policy.version)
        if not (directory / ADAPTER).is_file():
            return Sampler(self._whole(directory), policy.version, self._engine)
        adapter, below = read_adapter(directory), adapter_base(directory)
        base = BaseCheckpoint(
            checkpoint=below.name,
            digest=chain_digest(below),
            scaling=adapter.scaling,
            base_weights=adapter.base_weights,
        )
        return Sampler(self._beside(base, below.parent, adapter.matrices), policy.version, self._engine)

    def _whole(self, directory: Path) -> Transformer:
        """Load a checkpoint without an adapter of d1's: in a LoRA run, the base of later versions."""
        if not (directory / MANIFEST).is_file():
            return load_policy(directory, self._engine.torch_dtype, self._device, _say)
        weights: Weights = chain_digest(directory), "full"
        model, _ = self._sharing(weights, None)
        if model is None:
            _check_reachable(directory)
            model = load_weights(directory, self._engine.torch_dtype, self._device, _say)
        else:
            remove_adapters(model)
        self._loaded.append(_Loaded(weights=weights, base=None, model=ref(model)))
        return model

    def _beside(self, base: BaseCheckpoint, checkpoints_dir: Path, matrices: Mapping[str, Tensor]) -> Transformer:
        """Load a policy with an adapter on top of its base checkpoint."""
        if not (checkpoints_dir / base.checkpoint).is_dir():
            raise LookupError(f"the base checkpoint {base.checkpoint} is not in {checkpoints_dir} on this machine")
        directory = base.directory(checkpoints_dir)
        *adapted, below = checkpoint_chain(directory)
        weights = chain_digest(below), base.base_weights
        model, has_start = self._sharing(weights, base)
        if model is None:
            _check_reachable(below)
            verify_own_files(below, report=_say)
            dtype = self._engine.torch_dtype
            model = load_weights(below, dtype, self._device, _say, base_weights=base.base_weights)
        if has_start:
            set_adapter(model, matrices, base.scaling)
        else:
            for one in adapted:
                verify_own_files(one)
            attach_adapters(model, matrices, base.scaling, read_chain(directory).combined)
        self._loaded.append(_Loaded(weights=weights, base=base, model=ref(model)))
        return model

    def _sharing(self, weights: Weights, base: BaseCheckpoint | None) -> tuple[Transformer | None, bool]:
        """Return a policy that shares its frozen weights with one in memory, if there is one with the same.

        Also returns whether it shares the adapter `start` of `base`.
        """
        self._loaded = [one for one in self._loaded if one.model() is not None]
        alike = [one for one in self._loaded if one.weights == weights]
        for one in sorted(alike, key=lambda one: one.base != base):
            if (model := one.model()) is not None:
                return copy_sharing_base(model), base is not None and one.base == base
        return None, False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """Loaded policy. Others can share its weights as long as it is in use."""

    weights: Weights
    """Its frozen weights."""
    base: BaseCheckpoint | None
    """Base of its adapter; None without an adapter."""
    model: ref[Transformer]
    """Its network."""


def _check_reachable(directory: Path) -> None:
    """Raise LookupError if weight files that a checkpoint refers to are not on this machine."""
    for reference in read_references(directory).values():
        if not reference.path.is_file():
            raise LookupError(missing_message(directory, reference))


def _say(what: str) -> None:
    structlog.get_logger().info("reading_a_checkpoint", what=what)


def _verify(policy: PolicyVersion, directory: Path) -> None:
    """Raise ValueError if a checkpoint's own files are damaged, or are other weights than those announced."""
    has_manifest = (directory / MANIFEST).is_file()
    if policy.manifest_digest is None and not has_manifest and find_position(directory) is None:
        structlog.get_logger().warning("checkpoint_unverified", path=str(directory), why=f"it has no {MANIFEST}")
        return
    verify_own_files(directory, report=_say)
    if policy.manifest_digest is None:
        return
    digest = read_position(directory).manifest_digest or _digest_of(directory)
    if digest != policy.manifest_digest:
        raise ValueError(
            f"{directory} holds other weights than were announced: their checksum is {digest[:12]}, and that was "
            f"{policy.manifest_digest[:12]}"
        )


def _digest_of(directory: Path) -> str:
    """Compute the digest of a checkpoint of an earlier d1, which newer ones state."""
    from actors.weights.tensors import make_manifest

    return make_manifest(0, dict(load_policy(directory).named_parameters())).digest
