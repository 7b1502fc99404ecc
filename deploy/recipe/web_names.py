"""Hosts and origins as a recipe names them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints


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
"""A name without a port."""
Origin = Annotated[str, AfterValidator(_origin)]
"""Where a page comes from: scheme, name and port; `*` is any."""
