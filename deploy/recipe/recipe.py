"""Recipes: the config of a run's actors, plus its place and its service, as a user writes them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, PositiveInt, StringConstraints, model_validator

from actors.run_config import STRICT, RunConfig

# Names of versions that the service itself uses.
_OWN_NAME = re.compile(r"policy(@.*)?|base|best|last")


def _served(name: str) -> str:
    if _OWN_NAME.fullmatch(name):
        raise ValueError("must be another name than the service's own policy, base, best, last and policy@vNNNNNN")
    return name


def _origin(text: str) -> str:
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    is_origin = parts.scheme in ("http", "https") and parts.netloc and text == f"{parts.scheme}://{parts.netloc}"
    if text != "*" and not is_origin:
        raise ValueError("must be an origin, as https://example.org or http://127.0.0.1:3000, or *")
    return text


Hostname = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A host name without a port."""
Origin = Annotated[str, AfterValidator(_origin)]
"""Origin of a web page: scheme, host and port; `*` is any."""
ServedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}$"), AfterValidator(_served)]
"""Name of a model."""


class Stages(StrEnum):
    """Selection of a run's stages."""

    ALL = "all"
    """SFT, the rounds, and the control if the recipe enables it."""
    SFT = "sft"
    """SFT alone."""
    RL = "rl"
    """The rounds alone, from a given checkpoint."""


class ServiceSection(BaseModel):
    """The HTTP service that answers from the current policy."""

    model_config = STRICT

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen on."""
    num_replicas: PositiveInt = 1
    """Replicas of the engine."""
    max_replicas: PositiveInt | None = None
    """Let Ray Serve's autoscaler choose from `num_replicas` up to this many engines by their load; absent: always
    `num_replicas`."""
    max_live_versions: Annotated[int, Field(ge=2)] = 4
    """Policy versions that a replica holds in memory: the newest, the base, and those that requests still use."""
    rate_limit: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}/(second|minute|hour|day)$")] = "6000/minute"
    """Requests that each API key may make."""
    served_names: tuple[ServedName, ...] = ()
    """Additional names of the model `policy`, for clients that request a fixed name, such as `gpt-4o`."""
    allowed_hosts: tuple[Hostname, ...] = ()
    """Host names that requests may use besides `localhost` and addresses, such as a proxy's. Empty: no others on
    loopback, any elsewhere."""
    allowed_origins: tuple[Origin, ...] = ()
    """Origins of other pages that may call the service and read its answers (CORS), such as `https://example.org`, or
    `*`."""

    @model_validator(mode="after")
    def _replicas(self) -> ServiceSection:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below num_replicas {self.num_replicas}")
        return self


class Recipe(RunConfig):
    """Everything that determines a run, its directory and its service."""

    runs_dir: Path = Path("runs")
    """Parent of the run directories. On a cluster of several machines: a path that all of them share."""
    checkpoint_url: str | None = None
    """Mirror of the run's checkpoints, in a directory of the run's name: a path, or a URL that fsspec knows
    (`s3://bucket/runs` with the extra `d1[s3]`). `--resume` without the run's directory fetches it from there.
    Credentials belong in the environment, not in the URL."""
    service: ServiceSection = ServiceSection()
    """The HTTP service."""

    @property
    def run_dir(self) -> Path:
        """The run's directory, absolute."""
        return (self.runs_dir / self.name).resolve()


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, with the description of every field."""
    schema = Recipe.model_json_schema()
    # A file without a name takes the file's own, so it is not required.
    schema["required"] = [name for name in schema["required"] if name != "name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "A d1 recipe"}
