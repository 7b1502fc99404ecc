"""What a service answers from, a run or a checkpoint by itself: opened in each of its processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from actors.checkpoints.selection import servable_checkpoints
from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import CHECKPOINTS
from deploy.requests.defaults import Defaults
from deploy.requests.renoising import RenoisingDefaults
from deploy.runs.checkpoints import read_recipe
from deploy.service.api.planner import ServicePlanner
from deploy.service.api.policy_events import RegistryReader
from deploy.service.api.run_view import RunView
from deploy.service.api.text_codec import TextCodec
from deploy.service.checkpoints import Checkpoints, latest_checkpoint, plain_checkpoint
from deploy.service.example import Examples
from deploy.service.gateway.address import Address
from deploy.service.gateway.callers import Callers
from learner.model.checkpoint_files import generation_defaults
from learner.model.renoising.config import RenoisingConfig
from rollout.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from deploy.service.engine.versions import Locate, Versions

_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_LIVE_OF_CHECKPOINT = 2
_RATE_OF_CHECKPOINT = "6000/minute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A run's directory, or a checkpoint's."""

    directory: str
    is_run: bool
    registry_url: str | None
    """Where the run's versions are announced; None of a checkpoint, which has no others."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In what a checkpoint's weights are held; a run's recipe says how its are."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.directory)

    @property
    def name(self) -> str:
        """What the service calls it."""
        name = read_recipe(self.path).name if self.is_run else _NAME.sub("-", self.path.name).strip("-.")
        return name or "checkpoint"

    @property
    def rate_limit(self) -> str:
        """How often each key may ask."""
        return read_recipe(self.path).service.rate_limit if self.is_run else _RATE_OF_CHECKPOINT

    @property
    def max_replicas(self) -> int | None:
        """The most engines that Serve's autoscaler may start; None if it is off."""
        return read_recipe(self.path).service.max_replicas if self.is_run else None

    def callers(self, host: str, *, is_admin: bool = False) -> Callers:
        """Who may ask a listener on `host`. Other origins are for the service alone."""
        if not self.is_run:
            return Callers.of(host, (), ())
        service = read_recipe(self.path).service
        return Callers.of(host, service.allowed_hosts, () if is_admin else service.allowed_origins)

    def admin_address(self, port: int | None = None) -> Address | None:
        """Where the admin listener listens, on `port` or on the recipe's; None where there is to be none."""
        if not self.is_run:
            return None
        service = read_recipe(self.path).service
        port = port or service.admin_port
        return None if port is None else Address(host=service.admin_host, port=port)

    def run_view(self) -> RunView | None:
        """The run as the page reads it."""
        return RunView(self.path) if self.is_run else None

    def registry(self) -> Registry | None:
        """Where the run's versions are announced; None of a checkpoint."""
        return None if self.registry_url is None else Registry(self.registry_url, self.name)

    def registry_reader(self) -> RegistryReader | None:
        """The same for an event loop."""
        registry = self.registry()
        return None if registry is None else RegistryReader(registry)

    def codec(self) -> TextCodec:
        """How its policy reads and writes: all checkpoints of a run have the same tokenizer."""
        return TextCodec(servable_checkpoints(self.path / CHECKPOINTS)[-1][1] if self.is_run else self.path)

    def newest(self) -> PolicyVersion:
        """The version to begin with. Raises UserError where a run has none."""
        return latest_checkpoint(self.path) if self.is_run else plain_checkpoint(self.path)

    def planner(self, codec: TextCodec) -> ServicePlanner:
        """Makes the jobs of requests."""
        defaults: Defaults | RenoisingDefaults
        if self.is_run:
            defaults = Defaults.of_run(read_recipe(self.path).evaluated_params[0])
        elif isinstance(codec.config, RenoisingConfig):
            defaults = RenoisingDefaults(config=codec.config)
        else:
            stated = generation_defaults(self.path)
            defaults = Defaults.of_policy(codec.config.max_sequence_length, codec.config.block_length, stated)
        names = read_recipe(self.path).service.served_names if self.is_run else ()
        return ServicePlanner(codec, defaults, self.name, served_names=names)

    def examples(self) -> Examples:
        """Return example prompts for the policy."""
        return Examples(self.path)

    def versions(self, device: str | torch.device, num_threads: int = 1) -> Versions:
        """The versions of an engine, the newest of them loaded; on a CPU it computes with so many threads at most."""
        # Here and not above: of a service's processes its engines alone compute, and load torch.
        import torch

        from deploy.service.engine.canary import HeldoutCanary
        from deploy.service.engine.loaded_version import network_of
        from deploy.service.engine.loading import VersionLoader
        from deploy.service.engine.versions import Versions
        from learner.hardware import threads_for

        policy = self.newest()
        assert policy.checkpoint is not None, "it was found as a checkpoint"
        checkpoint = Path(policy.checkpoint)
        if self.is_run:
            # Checkpoints of a stage under way are deleted in time.
            initial = self.path / CHECKPOINTS / "initial"
            checkpoint = initial if initial.is_dir() else checkpoint
            recipe = read_recipe(self.path)
            engine, most_live = recipe.rollout.engine, recipe.service.max_live_versions
            locate: Locate = Checkpoints(self.path).locate
            wanted = recipe.service.canary
            canary = None if wanted is None else HeldoutCanary(recipe, wanted, checkpoint)
        else:
            canary = None
            engine, most_live = EngineConfig(dtype=self.dtype), _MAX_LIVE_OF_CHECKPOINT
            locate = _nothing
        loader = VersionLoader(checkpoint, engine, device)
        sampler = loader.load(policy)
        torch.set_num_threads(threads_for(network_of(sampler), num_threads))
        return Versions(
            sampler,
            policy,
            load=loader.load,
            locate=locate,
            most_live=most_live,
            canary=canary,
        )


def _nothing(_wanted: str | int) -> None:
    return None
