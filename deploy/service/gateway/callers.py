"""Host header validation and CORS: under which names the service may be asked, and by pages of which other origins."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from deploy.service.errors import ServiceError

_LOCAL = "localhost"
_REMEMBERED_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Callers:
    """Who may ask, beside having a key."""

    hosts: frozenset[str] | None = None
    """Names that requests may be sent to; None: any. An address has no name that somebody else could own."""
    origins: tuple[str, ...] = ()
    """Other origins whose pages may read the answers."""

    @classmethod
    def of(cls, listens_on: str, hosts: Collection[str], origins: Collection[str]) -> Callers:
        """Those of a listener. On loopback a name that is not given would be a page's that has its own name resolved to
        this machine (DNS rebinding); where others reach it, names are the operator's to give."""
        known = None if not hosts and not is_loopback(listens_on) else frozenset({_LOCAL, listens_on, *hosts})
        return cls(hosts=known, origins=tuple(origins))

    def refusal(self, scope: Scope) -> ServiceError | None:
        """What a request is refused with that is sent to a name that is none of the service's."""
        if self.hosts is None:
            return None
        for value in (value for name, value in scope["headers"] if name == b"host"):
            name = _name(value.decode("latin-1"))
            if name not in self.hosts and not _is_address(name):
                message = "This service is not known by that Host; its operator can name it in service.allowed_hosts."
                return ServiceError(421, message, "unknown_host")
        return None

    def allowing(self, app: ASGIApp) -> ASGIApp:
        """The application, with CORS where there are other origins."""
        if not self.origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "last-event-id", "x-request-id"),
            expose_headers=("retry-after", "x-policy-version", "x-request-id"),
            max_age=_REMEMBERED_S,
        )


ANYBODY = Callers()
"""Who has a key."""


def is_loopback(host: str) -> bool:
    """Whether nobody reaches it from another machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == _LOCAL


def _name(host: str) -> str:
    """Of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
