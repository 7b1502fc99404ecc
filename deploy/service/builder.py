"""The service as `serve deploy` wants it: an application from the arguments of a YAML file."""

# Without `from __future__ import annotations`: Ray looks at the annotation itself to check the arguments.
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from actors.registry_server import registry_url
from deploy.errors import UserError
from deploy.service.launch import bound_application
from deploy.service.run_files import read_recipe
from deploy.service.source import Source


class Arguments(BaseModel):
    """The `args` of the application in deploy/serve.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path
    """The run directory, absolute; every node of the cluster sees it."""


def application(arguments: Arguments) -> Any:
    """The service of a run, unstarted. Ray calls this on the cluster.

    Raises UserError when there is no such run, what `registry_url` raises when its registry cannot be reached.
    """
    if not arguments.run_dir.is_absolute():
        raise UserError(f"run_dir is {arguments.run_dir}; every node must find it, so it has to be absolute")
    source = Source(directory=str(arguments.run_dir), is_run=True, registry_url=registry_url())
    num_replicas = read_recipe(arguments.run_dir).service.num_replicas
    return bound_application(source, num_replicas, num_gpus=0, admin=source.admin_address())
