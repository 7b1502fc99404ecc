"""The Ray Serve deployment: one process with an engine, its application and its follower."""

from __future__ import annotations

from pathlib import Path

import torch
from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig

from actors.registry import Registry
from deploy.service.app import MAX_PENDING, create_app
from deploy.service.engine import PolicyEngine
from deploy.service.follower import VersionFollower
from deploy.service.run_files import latest_checkpoint, load_sampler, read_recipe


# The queue that matters is the application's own: it answers in our error format and leaves /health free. Serve's
# limits are wider, and only there so that nothing is unbounded.
@serve.deployment(
    max_ongoing_requests=4 * MAX_PENDING,
    max_queued_requests=4 * MAX_PENDING,
    backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
    # A new deployment of the run starts its replicas before the old ones stop.
    max_surge_percent=100,
    health_check_period_s=5,
    # Little enough to be placed beside a run that has all the CPUs.
    ray_actor_options={"num_cpus": 0.01},
)
@serve.ingress()
class PolicyReplica:
    """Answers from the newest version of one run."""

    def __init__(self, run_dir: str, registry_url: str, token_digest: bytes) -> None:
        """Begin with the newest checkpoint, or with what the registry already announces."""
        # One thread for each process that shares the machine with a run.
        torch.set_num_threads(1)
        directory = Path(run_dir)
        recipe, policy = read_recipe(directory), latest_checkpoint(directory)
        assert policy.checkpoint is not None, "it was found as a checkpoint"
        checkpoint = Path(policy.checkpoint)
        self._run, self._token_digest = recipe.name, token_digest
        engine = recipe.rollout.engine
        sampler = load_sampler(policy, checkpoint, engine)
        self._engine = PolicyEngine(checkpoint, recipe.rollout.sampling, sampler, policy)
        registry = Registry(registry_url, recipe.name)
        self._follower = VersionFollower(
            registry, self._engine, lambda announced: load_sampler(announced, checkpoint, engine)
        )
        # Not healthy before it has what its siblings serve: a new replica never answers with an older version.
        self._follower.follow_once(block_ms=0)
        self._follower.ensure_running()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._engine, self._run, self._token_digest, lambda: self._follower.status)

    def check_health(self) -> None:
        """Serve asks every few seconds."""
        self._follower.ensure_running()
