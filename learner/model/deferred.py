"""Torch, imported when it is first used: `lazy import torch` (PEP 810), which Python has from 3.15 on.

Methods are configured by the classes that compute them. The command line, the coordinator and the service's ingress
read such configs and compute nothing: without torch each of them starts a second of CPU sooner, and is 180 MB smaller.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Deferred(ModuleType):
        """What is asked of it is asked of torch."""

        def __getattr__(self, name: str) -> Any:
            import torch as loaded

            return getattr(loaded, name)

    torch = _Deferred("torch")

__all__ = ["torch"]
