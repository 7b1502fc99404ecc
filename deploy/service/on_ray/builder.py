"""The service for `serve deploy`: builds the application from the arguments of a YAML file."""

# Without `from __future__ import annotations`: Ray looks at the annotation itself to check the arguments.
import time
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field

from actors.checkpoints.selection import servable_checkpoints
from actors.registry.server import registry_url
from actors.run_log import CHECKPOINTS
from deploy.errors import UserError
from deploy.runs.checkpoints import read_recipe
from deploy.service.on_ray.launch import bound_application
from deploy.service.source import Address, Source

_LOOK_EVERY_S, _SAY_EVERY_S = 1.0, 15.0


class Arguments(BaseModel):
    """The `args` of the application in deploy/serve.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path
    """The run directory, absolute; every node of the cluster sees it."""
    host: str = "127.0.0.1"
    """Address of Serve's proxies, as in `http_options`; one that is not loopback needs keys of your own."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Their port."""
    num_ingresses: Annotated[int, Field(ge=1, le=1000)] = 1
    """Replicas of the HTTP application."""
    num_engines: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Replicas of the engine; None: `service.num_replicas` of the run's recipe."""
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds to wait for a run that does not exist yet or has no checkpoint: Ray Serve does not retry."""


def application(arguments: Arguments) -> Any:
    """Return the application of a run's service. Ray calls this on the cluster.

    Raises UserError if there is no such run within `wait_s` or the address needs keys of the user's own, and what
    `registry_url` raises if its registry cannot be reached.
    """
    if not arguments.run_dir.is_absolute():
        raise UserError(f"run_dir is {arguments.run_dir}; every node must find it, so it has to be absolute")
    _wait_for_checkpoint(arguments.run_dir, arguments.wait_s)
    source = Source(directory=str(arguments.run_dir), is_run=True, registry_url=registry_url())
    recipe = read_recipe(arguments.run_dir)
    num_engines = arguments.num_engines or recipe.service.num_replicas
    return bound_application(
        source,
        Address(host=arguments.host, port=arguments.port),
        num_engines,
        num_gpus=recipe.gpus.engine,
        num_ingresses=arguments.num_ingresses,
    )


def _wait_for_checkpoint(run_dir: Path, wait_s: float) -> None:
    """Wait for at most `wait_s` seconds; reading the run then reports what is missing."""
    began, said = time.monotonic(), 0.0
    while (waited := time.monotonic() - began) < wait_s and not servable_checkpoints(run_dir / CHECKPOINTS):
        if waited >= said:
            structlog.get_logger().info("waiting_for_run", run_dir=str(run_dir), waited_s=round(waited))
            said += _SAY_EVERY_S
        time.sleep(min(_LOOK_EVERY_S, wait_s - waited))
