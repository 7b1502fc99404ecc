"""Source of a service, a run or a single checkpoint, which each of its processes opens; and its address."""

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
from deploy.recipe.recipe import ServiceSection
from deploy.requests.families import defaults_of
from deploy.runs.checkpoints import read_recipe
from deploy.service.api.inference import ServicePlanner
from deploy.service.api.policy_events import RegistryReader
from deploy.service.api.text_codec import TextCodec
from deploy.service.checkpoints import Checkpoints, latest_checkpoint, plain_checkpoint
from deploy.service.contract import Backend
from rollout.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from deploy.service.api.app import Service
    from deploy.service.engine.versions import Locate, Versions

_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Address that the service listens on."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


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
    def settings(self) -> ServiceSection:
        """Settings of the service: those of the run's recipe, or the defaults for a single checkpoint."""
        return read_recipe(self.path).service if self.is_run else ServiceSection(max_live_versions=2)

    def registry(self) -> Registry | None:
        """Client of the run's registry; None for a checkpoint."""
        return None if self.registry_url is None else Registry(self.registry_url, self.name)

    def codec(self) -> TextCodec:
        """Tokenization of the policy: all checkpoints of a run have the same tokenizer."""
        return TextCodec(servable_checkpoints(self.path / CHECKPOINTS)[-1][1] if self.is_run else self.path)

    def planner(self, codec: TextCodec) -> ServicePlanner:
        """Create the planner of requests."""
        evaluated = read_recipe(self.path).evaluated_params[0] if self.is_run else None
        defaults = defaults_of(self.path, codec.config, evaluated)
        return ServicePlanner(codec, defaults, self.name, served_names=self.settings.served_names)

    def service(self, backend: Backend) -> Service:
        """Return the dependencies of the HTTP application; `backend` are its engines."""
        # Imported here because engines have no HTTP application.
        from deploy.service.api.app import Service

        codec, registry = self.codec(), self.registry()
        return Service(
            backend=backend,
            codec=codec,
            planner=self.planner(codec),
            checkpoints=Checkpoints(self.path) if self.is_run else None,
            directory=self.path,
            registry=None if registry is None else RegistryReader(registry),
        )

    def versions(self, device: str | torch.device, num_threads: int = 1) -> Versions:
        """Load the newest version for an engine; on a CPU it uses up to `num_threads` threads.

        Raises UserError if a run has no checkpoint.
        """
        # Imported here because only engines need torch.
        import torch

        from deploy.service.engine.loading import VersionLoader
        from deploy.service.engine.versions import Versions
        from learner.hardware import threads_for

        policy = latest_checkpoint(self.path) if self.is_run else plain_checkpoint(self.path)
        assert policy.checkpoint is not None, "it was found as a checkpoint"
        checkpoint, engine = Path(policy.checkpoint), EngineConfig(dtype=self.dtype)
        locate: Locate = lambda _: None  # noqa: E731
        if self.is_run:
            # Checkpoints of the current stage are deleted later.
            initial = self.path / CHECKPOINTS / "initial"
            checkpoint = initial if initial.is_dir() else checkpoint
            engine = read_recipe(self.path).rollout.engine
            locate = _located_by(Checkpoints(self.path), self.registry())
        loader = VersionLoader(checkpoint, engine, device)
        sampler = loader.load(policy)
        torch.set_num_threads(threads_for(sampler.model, num_threads))
        return Versions(sampler, policy, load=loader.load, locate=locate, most_live=self.settings.max_live_versions)


def _located_by(checkpoints: Checkpoints, registry: Registry | None) -> Locate:
    """Look for a version in the registry, which knows the weight store that has it, and in the run's checkpoints."""

    def locate(wanted: str | int) -> PolicyVersion | None:
        on_disk, announced = checkpoints.locate(wanted), None
        if registry is not None and isinstance(wanted, int):
            with suppress(ConnectionError):
                announced = registry.version(wanted)
        return on_disk if announced is None else announced.with_checkpoint_of(on_disk)

    return locate
