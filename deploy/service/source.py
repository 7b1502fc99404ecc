"""Source of a service: a run, or a single checkpoint. Each process of the service opens it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from actors.checkpoints.selection import servable_checkpoints
from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import CHECKPOINTS
from deploy.requests.families import defaults_of
from deploy.runs.checkpoints import read_recipe
from deploy.service.api.planner import ServicePlanner
from deploy.service.api.policy_events import RegistryReader
from deploy.service.api.text_codec import TextCodec
from deploy.service.checkpoints import Checkpoints, latest_checkpoint, plain_checkpoint
from deploy.service.example import Examples
from deploy.service.gateway.callers import Callers
from rollout.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from deploy.service.engine.versions import Locate, Versions

_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_LIVE_OF_CHECKPOINT = 2
_RATE_OF_CHECKPOINT = "6000/minute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Directory of a run or of a checkpoint."""

    directory: str
    is_run: bool
    registry_url: str | None
    """URL of the run's registry; None for a checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of a checkpoint's weights in memory; a run has that of its recipe."""

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory)

    @property
    def name(self) -> str:
        """Name of the run or the checkpoint, in the service's answers."""
        name = read_recipe(self.path).name if self.is_run else _NAME.sub("-", self.path.name).strip("-.")
        return name or "checkpoint"

    @property
    def rate_limit(self) -> str:
        """Rate limit of each key."""
        return read_recipe(self.path).service.rate_limit if self.is_run else _RATE_OF_CHECKPOINT

    @property
    def max_replicas(self) -> int | None:
        """The most engines that Serve's autoscaler may start; None if it is off."""
        return read_recipe(self.path).service.max_replicas if self.is_run else None

    def callers(self, host: str) -> Callers:
        """Host names and origins that a listener on `host` accepts."""
        if not self.is_run:
            return Callers.of(host, (), ())
        service = read_recipe(self.path).service
        return Callers.of(host, service.allowed_hosts, service.allowed_origins)

    def checkpoints(self) -> Checkpoints | None:
        """Return the checkpoints of the run; None for a checkpoint by itself."""
        return Checkpoints(self.path) if self.is_run else None

    def registry(self) -> Registry | None:
        """Client of the run's registry; None for a checkpoint."""
        return None if self.registry_url is None else Registry(self.registry_url, self.name)

    def registry_reader(self) -> RegistryReader | None:
        """Asynchronous reader of the registry; None for a checkpoint."""
        registry = self.registry()
        return None if registry is None else RegistryReader(registry)

    def codec(self) -> TextCodec:
        """Tokenization of the policy: all checkpoints of a run have the same tokenizer."""
        return TextCodec(servable_checkpoints(self.path / CHECKPOINTS)[-1][1] if self.is_run else self.path)

    def newest(self) -> PolicyVersion:
        """Return the version to begin with. Raises UserError if a run has none."""
        return latest_checkpoint(self.path) if self.is_run else plain_checkpoint(self.path)

    def planner(self, codec: TextCodec) -> ServicePlanner:
        """Create the planner of requests."""
        recipe = read_recipe(self.path) if self.is_run else None
        evaluated = None if recipe is None else recipe.evaluated_params[0]
        names = () if recipe is None else recipe.service.served_names
        defaults = defaults_of(self.path, codec.config, evaluated)
        return ServicePlanner(codec, defaults, self.name, served_names=names)

    def examples(self) -> Examples:
        """Return example prompts for the policy."""
        return Examples(self.path)

    def versions(self, device: str | torch.device, num_threads: int = 1) -> Versions:
        """Create the versions of an engine and load the newest; on a CPU it uses up to `num_threads` threads."""
        # Imported here because only engines need torch.
        import torch

        from deploy.service.engine.loading import VersionLoader
        from deploy.service.engine.versions import Versions
        from learner.hardware import threads_for

        policy = self.newest()
        assert policy.checkpoint is not None, "it was found as a checkpoint"
        checkpoint = Path(policy.checkpoint)
        if self.is_run:
            # Checkpoints of the current stage are deleted later.
            initial = self.path / CHECKPOINTS / "initial"
            checkpoint = initial if initial.is_dir() else checkpoint
            recipe = read_recipe(self.path)
            engine, most_live = recipe.rollout.engine, recipe.service.max_live_versions
            locate: Locate = _located_by(Checkpoints(self.path), self.registry())
        else:
            engine, most_live = EngineConfig(dtype=self.dtype), _MAX_LIVE_OF_CHECKPOINT
            locate = _nothing
        loader = VersionLoader(checkpoint, engine, device)
        sampler = loader.load(policy)
        torch.set_num_threads(threads_for(sampler.model, num_threads))
        return Versions(sampler, policy, load=loader.load, locate=locate, most_live=most_live)


def _located_by(checkpoints: Checkpoints, registry: Registry | None) -> Locate:
    """Look for a version in the registry, which knows the weight store that has it, and in the run's checkpoints."""

    def locate(wanted: str | int) -> PolicyVersion | None:
        on_disk, announced = checkpoints.locate(wanted), None
        if registry is not None and isinstance(wanted, int):
            with suppress(ConnectionError):
                announced = registry.version(wanted)
        return on_disk if announced is None else announced.with_checkpoint_of(on_disk)

    return locate


def _nothing(_wanted: str | int) -> None:
    return None
