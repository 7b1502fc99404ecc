"""Lazy import of torch, on first use: a substitute for `lazy import torch` (PEP 810) of Python 3.15.

The classes that compute a method also hold its config. The command line, the coordinator and the service's ingress read
such configs but compute nothing. Without torch, each of them saves a second of CPU at its start and 180 MB of memory.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Deferred(ModuleType):
        """Proxy that forwards attribute access to torch."""

        def __getattr__(self, name: str) -> Any:
            import torch as loaded

            return getattr(loaded, name)

    torch = _Deferred("torch")

__all__ = ["torch"]
