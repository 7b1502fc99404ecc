"""Import of peers' code from their checkouts: the first d1's trainer, and Fast-dLLM's network and samplers.

The code runs unchanged. Packages that the first d1's trainer imports for the training loop, which is not measured, may
be missing: placeholders replace them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from learner.model.families import FAMILIES
from learner.model.transformer import Transformer

Generate = Callable[..., tuple[Tensor, int]]
"""One of Fast-dLLM's samplers: returns canvases, prompts included, and the number of forwards."""

_TRAINER = Path("diffu-grpo", "diffu_grpo_trainer.py")
_OF_LOOP = ("trl", "wandb", "accelerate", "datasets")
_SAMPLERS = Path("llada", "generate.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class FastDllm:
    """Fast-dLLM's code for LLaDA."""

    samplers: dict[str, Generate]
    """By the name that the cache has in `SamplingParams`; `none` is the one without."""
    make_config: Callable[..., Any]
    make_network: Callable[..., Any]
    """Its copy of LLaDA's modeling code, which it extended by caches."""

    def network(self, policy: Transformer) -> Any:
        """Make its network with the weights of a policy of ours, whose memory it shares."""
        family = FAMILIES["llada"]
        config = self.make_config(**family.write_config(policy.config))
        # Newer versions of transformers drop it from a config that was made with it.
        config.use_cache = False
        with torch.device("meta"):
            network = self.make_network(config)
        weights = {family.checkpoint_name(name): weight for name, weight in policy.state_dict().items()}
        network.load_state_dict(weights, assign=True)
        return network.requires_grad_(False).eval()


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """Code of all peers."""

    first_trainer: type
    """The first d1's `DiffuGRPOTrainer`."""
    fast_dllm: FastDllm


def load_peers(first_d1: Path, fast_dllm: Path) -> Peers:
    """Import the peers' code. Raises ValueError if a directory is no checkout, or its code cannot be imported."""
    return Peers(first_trainer=_first_trainer(first_d1), fast_dllm=_fast_dllm(fast_dllm))


def _fast_dllm(checkout: Path) -> FastDllm:
    """Import Fast-dLLM's samplers and network."""
    path = _found(checkout, _SAMPLERS, "Fast-dLLM (NVlabs/Fast-dLLM)")
    # Its modules import each other as `model`.
    sys.path.insert(0, str(path.parent))
    try:
        module = _import_file("fast_dllm_samplers", path)
        configuration = sys.modules["model.configuration_llada"]
    except ImportError as error:
        raise ValueError(f"{path} cannot be imported: {error}; install what it needs") from error
    finally:
        sys.path.remove(str(path.parent))
    return FastDllm(
        samplers={
            "none": module.generate,
            "prefix": module.generate_with_prefix_cache,
            "dual": module.generate_with_dual_cache,
        },
        make_config=configuration.LLaDAConfig,
        make_network=module.LLaDAModelLM,
    )


def _first_trainer(checkout: Path) -> type:
    """Import the first d1's `DiffuGRPOTrainer`."""
    path = _found(checkout, _TRAINER, "the first d1 (dllm-reasoning/d1)")
    with _placeholders(_OF_LOOP):
        module = _import_file("first_d1_trainer", path)
    # accelerate's also seeds Python and numpy, which the trainer's masks do not use.
    vars(module)["set_seed"] = torch.manual_seed
    return cast(type, module.DiffuGRPOTrainer)


def _found(checkout: Path, path: Path, project: str) -> Path:
    if not (checkout / path).is_file():
        raise ValueError(f"{checkout} is not a checkout of {project}: it has no {path}")
    return checkout / path


def _import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a Python file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Placeholder(ModuleType):
    """Module that has every name: a class where a class would be, otherwise the identity, as a decorator is used."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 (a module's attribute, which marks it as a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else lambda given, *_: given


class _PlaceholderFinder(MetaPathFinder, Loader):
    """Finder of placeholders for packages that no other finder has."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder has no code."""


@contextmanager
def _placeholders(packages: Sequence[str]) -> Iterator[None]:
    """Let missing packages be imported within the block."""
    finder = _PlaceholderFinder(packages)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Placeholder)]:
            del sys.modules[name]
