"""Local deployment for benchmarks: a run of random policies, and its service on a local Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.registry.server import free_port
from actors.run_log import RECIPE
from deploy.orphans import descendants
from deploy.service.gateway.keys import KEYS_FILE_VARIABLE, TOKEN_VARIABLE
from learner.model.checkpoint import save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.tokenizer import EOS, MASK, ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer, init_weights
from rollout.sampler import Sampler

KEY = "benchmark-" + "0" * 16
NUM_WEIGHTS = 4
"""Number of different weights. Versions cycle through them, so that consecutive versions always differ."""
_NUM_KEPT = 3
ENGINE = "EngineReplica"
ROLES = {"proxy": "ProxyActor", "ingress": ":Ingress", "engine": ENGINE}
"""Substrings that identify Ray's processes by role."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Size of the policy, and its denoising schedule."""

    d_model: int = 128
    num_layers: int = 4
    gen_length: int = 32
    block_length: int = 8
    steps: int = 32


class Policies:
    """Policy versions of a run, with random weights."""

    def __init__(self, directory: Path, shape: Shape, num_replicas: int) -> None:
        """Create the run, with a checkpoint of version 1."""
        self.directory, self.shape, self.num_replicas = directory, shape, num_replicas
        self.newest = 1
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._tokenizer_dir = directory.parent / "tokenizer"
        make_tokenizer(["What is 1 + 2?", "The sum is 3."], self._tokenizer_dir, 320)
        tokenizer = ChatTokenizer(self._tokenizer_dir)
        self.eos_id = tokenizer.token_id(EOS)
        self._config = TransformerConfig(
            vocab_size=len(tokenizer),
            d_model=shape.d_model,
            num_layers=shape.num_layers,
            num_heads=4,
            num_kv_heads=4,
            mlp_hidden_size=shape.d_model * 11 // 4,
            max_sequence_length=256,
            mask_token_id=tokenizer.token_id(MASK),
            eos_token_id=self.eos_id,
            pad_token_id=self.eos_id,
        )
        directory.mkdir()
        (directory / RECIPE).write_text(yaml.safe_dump(_recipe(directory.name, shape, num_replicas)))
        self.save(1, "sft")

    def model(self, version: int) -> Transformer:
        """Make the network of a version."""
        model = Transformer(self._config)
        init_weights(model, seed=version % NUM_WEIGHTS)
        return model

    def weights(self, version: int) -> dict[str, Tensor]:
        """Return the weights of a version, cached so that their creation is not measured."""
        index = version % NUM_WEIGHTS
        if index not in self._weights:
            self._weights[index] = self.model(version).state_dict()
        return self._weights[index]

    def sampler(self, version: int) -> Sampler:
        """Make a sampler in this process that is equal to the service's."""
        return Sampler(self.model(version), version)

    def save(self, version: int, phase: str = "rl") -> Path:
        """Write a checkpoint of a version."""
        path = self.directory / "checkpoints" / f"{phase}-{version}"
        state = {"phase": phase, "round": version - 1, "policy_version": version, "rl_seconds": 0.0}
        save_checkpoint(path, self._config, self.weights(version), self._tokenizer_dir, trainer_state=state)
        return path

    def facts(self, version: int, **known: Any) -> PolicyVersion:
        """Return the metadata that is published for a version."""
        nothing = dict.fromkeys(("num_correct", "num_problems", "checkpoint", "weight_store", "manifest_digest"))
        return PolicyVersion(version=version, round=version - 1, phase="rl", **nothing | known)


def _recipe(name: str, shape: Shape, num_replicas: int) -> dict[str, Any]:
    sampling = {"gen_length": shape.gen_length, "block_length": shape.block_length, "num_denoise_steps": shape.steps}
    return {
        "name": name,
        "task": {"name": "sums"},
        "sft": {"num_labels": 8, "num_steps": 1},
        "learner": {"num_rounds": 1},
        "num_train_problems": 32,
        "rollout": {"sampling": sampling},
        "service": {"num_replicas": num_replicas, "rate_limit": "1000000/minute"},
    }


class Publisher:
    """Publishes versions as a run does, alternately from its weight store and from a checkpoint."""

    def __init__(self, policies: Policies, registry: Registry) -> None:
        import ray

        from actors import NAMESPACE
        from actors.weights.store import WeightStore, store_name

        self._policies, self._registry = policies, registry
        self._store_name = store_name(policies.directory.name)
        options = {"name": self._store_name, "namespace": NAMESPACE, "num_cpus": 0}
        self._store: Any = ray.remote(WeightStore).options(**options).remote(_NUM_KEPT)

    def publish(self) -> int:
        """Publish the next version. Returns its number."""
        import ray

        from actors.weights.tensors import make_manifest, put

        policies = self._policies
        version = policies.newest + 1
        if version % 2:
            facts = policies.facts(version, checkpoint=str(policies.save(version)))
        else:
            weights = policies.weights(version)
            manifest = make_manifest(version, weights)
            ray.get(self._store.publish.remote(manifest, put(weights)), timeout=_TIMEOUT_S)
            facts = policies.facts(version, weight_store=self._store_name, manifest_digest=manifest.digest)
        self._registry.announce(facts)
        policies.newest = version
        return version


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """A running service."""

    url: str
    policies: Policies
    publisher: Publisher


@contextmanager
def deployed(directory: Path, shape: Shape, num_replicas: int) -> Iterator[Deployed]:
    """Start a run, its registry and its service on a separate Ray, and stop them at the end of the block."""
    from actors.registry.server import registry_url
    from deploy.ray_session import ray_session
    from deploy.service.on_ray.launch import deploy_source
    from deploy.service.source import Address, Source

    torch.set_num_threads(1)
    policies = Policies(directory, shape, num_replicas)
    with _environment(), ray_session(dashboard=False), ExitStack() as at_end:
        at_end.callback(forget_serve)
        url = registry_url()
        source = Source(directory=str(directory), is_run=True, registry_url=url)
        address = deploy_source(source, Address(host="127.0.0.1", port=free_port()), num_replicas)
        with closing(Registry(url, directory.name)) as registry:
            yield Deployed(url=address, policies=policies, publisher=Publisher(policies, registry))


def forget_serve() -> None:
    """Clear this process's cached handle to a Serve instance that has stopped."""
    from ray.serve.context import _set_global_client

    _set_global_client(None)


@contextmanager
def _environment() -> Iterator[None]:
    """Set the environment of Ray's processes, and restore it afterwards."""
    before = dict(os.environ)
    for name in ("RAY_ADDRESS", "D1_REDIS_URL", KEYS_FILE_VARIABLE):
        os.environ.pop(name, None)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", TOKEN_VARIABLE: KEY}
    # The same niceness as the in-process sampler, which the service is compared with. Ray's default is 15.
    os.environ["RAY_worker_niceness"] = str(os.nice(0))  # noqa: SIM112 - Ray's name
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def processes(role: str) -> set[int]:
    """Find Ray's descendant processes of this one whose name contains `role`."""
    found = set()
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            # Ray sets a worker's process title to its task or actor.
            if role.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def cpu_s() -> dict[str, float]:
    """Return the CPU seconds so far of each role's processes."""
    return {role: sum(map(_cpu_s, processes(name))) for role, name in ROLES.items()}


def _cpu_s(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def kill(pid: int) -> None:
    """Send SIGKILL to a process."""
    os.kill(pid, signal.SIGKILL)
