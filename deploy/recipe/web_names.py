"""Types of host names, CORS origins and model names in a recipe."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints

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
