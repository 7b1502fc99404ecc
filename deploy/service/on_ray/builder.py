"""The service as `serve deploy` wants it: an application from the arguments of a YAML file."""

# Without `from __future__ import annotations`: Ray looks at the annotation itself to check the arguments.
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from actors.registry.server import registry_url
from deploy.errors import UserError
from deploy.runs.reading import read_recipe
from deploy.service.gateway.address import Address
from deploy.service.link.contact import LOOPBACK
from deploy.service.on_ray.launch import bound_application
from deploy.service.source import Source


class Arguments(BaseModel):
    """The `args` of the application in deploy/serve.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path
    """The run directory, absolute; every node of the cluster sees it."""
    host: str = LOOPBACK
    """Where each ingress listens; another address than loopback wants keys of your own."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    num_ingresses: Annotated[int, Field(ge=1, le=1000)] = 1
    """Processes that answer HTTP; several on one node share the port."""
    num_engines: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Replicas of the policy; None for `service.num_replicas` of the run's recipe."""


def application(arguments: Arguments) -> Any:
    """The service of a run, unstarted. Ray calls this on the cluster.

    Raises UserError when there is no such run or the address needs keys that nobody chose, what `registry_url` raises
    when its registry cannot be reached.
    """
    if not arguments.run_dir.is_absolute():
        raise UserError(f"run_dir is {arguments.run_dir}; every node must find it, so it has to be absolute")
    source = Source(directory=str(arguments.run_dir), is_run=True, registry_url=registry_url())
    recipe = read_recipe(arguments.run_dir)
    num_engines = arguments.num_engines or recipe.service.num_replicas
    return bound_application(
        source,
        Address(host=arguments.host, port=arguments.port),
        num_engines,
        num_gpus=recipe.gpus.engine,
        admin=source.admin_address(),
        num_ingresses=arguments.num_ingresses,
    )
