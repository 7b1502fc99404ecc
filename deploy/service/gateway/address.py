"""The host and port of a server."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where something listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """What a client asks."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """IPv6 for what can be nothing else."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET
