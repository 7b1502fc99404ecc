"""Start, wait for and stop a run's actors on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import NAMESPACE, actor_name
from actors.coordination.coordinator import Coordinator
from actors.grader import GraderWorker
from actors.learner_room import placeable_workers
from actors.machines import alive_nodes
from actors.resources import (
    coordinator_resources,
    grader_resources,
    learner_resources,
    sampler_resources,
    store_resources,
)
from actors.sampler import SamplerWorker, read_from
from actors.spec import RunSpec
from actors.training.run_client import Heartbeat, RunClient
from actors.weights.store import WeightStore, store_name
from learner.parallel.consensus import LeaderFailedError, Ranks, is_peer_failure
from learner.parallel.progress import PROGRESS

_START_TIMEOUT_S = 600.0
_VERDICT_TIMEOUT_S = 120.0
# The coordinator normally gives up long before. This limit is for groups that fail before they reach it.
_MAX_LEARNER_RESTARTS = 1000
_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"

WORKER_ENV = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment of a run's processes: a fast-polling Ray Train controller, no look-ups at a hub, and one thread per
process, as several share a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunActors:
    """The handles of a run's actors."""

    coordinator: Any
    """The coordinator."""
    store: Any
    """The weight store. It is detached, because the service may outlive the run."""
    pools: tuple[Any, ...]
    """Samplers and graders."""


class LearnerFailedError(Exception):
    """The learner group failed for good; the message says why."""


def start_actors(spec: RunSpec, num_graders: int, registry_url: str, driver: str, store_bytes: int) -> RunActors:
    """Create the pools, the weight store and the coordinator; `wait_until_ready` waits until they are up.

    Ray restarts each of them if it dies. `driver` identifies this attempt at the run; `store_bytes` is what policy
    versions take of one machine's object store.
    """
    restarted = {"max_restarts": -1, "max_task_retries": -1}
    store: Any = (
        watched(WeightStore)
        # Reuse the store that an earlier attempt at the run may have left.
        .options(
            name=store_name(spec.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            # Soft: a store that restarts after its machine has left goes elsewhere.
            scheduling_strategy=NodeAffinitySchedulingStrategy(_store_node(store_bytes), soft=True),
            **restarted,
            **store_resources(),
        )
        .remote(spec.learner.max_staleness + 2)
    )
    samplers = dict(start_sampler(spec, store, index) for index in range(spec.rollout.num_samplers))
    graders = dict(start_grader(spec, index) for index in range(num_graders))
    # If a run of this name were active, creating its samplers again would have failed by now, so its store stays as it
    # is.
    store.keep.remote(spec.learner.max_staleness + 2)
    # The coordinator writes the run directory, so it must be on the driver's node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    coordinator: Any = (
        ray.remote(Coordinator)
        .options(
            name=actor_name(spec.name, "coordinator"), scheduling_strategy=here, **restarted, **coordinator_resources()
        )
        .remote(
            spec, samplers, graders, store, registry_url=registry_url, store_name=store_name(spec.name), driver=driver
        )
    )
    return RunActors(coordinator=coordinator, store=store, pools=(*samplers.values(), *graders.values()))


def _store_node(num_bytes: int) -> str:
    """Return the node for a weight store with so many bytes of policy versions.

    That is the driver's if they fit its object store, as the run ends with that node anyway; otherwise the one with the
    largest object store.
    """
    here = ray.get_runtime_context().get_node_id()
    rooms = {node["NodeID"]: node["Resources"].get("object_store_memory", 0) for node in alive_nodes()}
    return here if rooms[here] >= num_bytes else max(rooms, key=lambda node: rooms[node])


def start_sampler(spec: RunSpec, store: Any, index: int) -> tuple[str, Any]:
    """Create the run's sampler `index`. Returns its name within the run and its handle."""
    name = f"sampler {index}"
    sampler: Any = (
        watched(SamplerWorker)
        .options(
            name=actor_name(spec.name, name),
            max_restarts=-1,
            scheduling_strategy=spec.placement.samplers,
            label_selector=dict(spec.placement.sampler_labels) or None,
            **sampler_resources(spec.device, spec.gpus.sampler_request),
        )
        .remote(
            spec.initial_checkpoint,
            read_from(store),
            spec.device,
            spec.rollout.engine,
            spec.gpus.sampler,
            is_offloaded=spec.gpus.colocate,
        )
    )
    return name, sampler


def start_grader(spec: RunSpec, index: int) -> tuple[str, Any]:
    """Create the run's grader `index`. Returns its name within the run and its handle."""
    name = f"grader {index}"
    grader: Any = (
        watched(GraderWorker)
        .options(name=actor_name(spec.name, name), max_restarts=-1, **grader_resources())
        .remote(spec.task, spec.reward, spec.initial_checkpoint)
    )
    return name, grader


def watched(actor_class: type) -> Any:
    """Make an actor class with concurrency groups, so that some calls are answered while another one runs.

    These are `ready`, which `Pools` and `LivenessMonitor` poll, and a sampler's `prefetch`.
    """
    remote: Any = ray.remote  # Its type stubs lack `concurrency_groups`.
    return remote(concurrency_groups={"liveness": 1, "weights": 1})(actor_class)


def wait_until_ready(actors: RunActors) -> None:
    """Wait until every actor of a run answers.

    Raises:
        TimeoutError: the cluster did not place them all in time.
        ray.exceptions.RayError: one of them could not be created.
    """
    answers = [actor.ready.remote() for actor in actors.pools] + [actors.coordinator.gave_up.remote()]
    try:
        ray.get(answers, timeout=_START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(
            f"the cluster did not start {len(actors.pools)} samplers and graders and the coordinator within "
            f"{_START_TIMEOUT_S:.0f} s; check with --dry-run that it has room for them"
        ) from error


def stop_actors(actors: RunActors, *, keep_store: bool) -> None:
    """Kill a run's actors; `keep_store` spares the store, for a service that still reads from it."""
    # The coordinator first, so that it does not record the deaths of the others as failures.
    for actor in (actors.coordinator, *actors.pools, *(() if keep_store else (actors.store,))):
        ray.kill(actor)


def fit(spec: RunSpec, actors: RunActors) -> None:
    """Run the learner group until it ends; blocks.

    The coordinator decides whether a failed group is restarted: as long as the run makes progress. The number of
    failures does not matter, since a long run on many machines is bound to have many. If the cluster has no room for
    the group in time, and the recipe allows fewer workers, it goes on with as many as there is room for.

    Raises LearnerFailedError if the coordinator gives up or Ray Train's controller dies.
    """
    from ray.train import ControllerError

    num_workers = spec.learner.num_workers
    while True:
        try:
            _trainer(spec, actors, num_workers).fit()
            break
        except ActorDiedError as error:
            raise LearnerFailedError("Ray Train's controller died") from error
        except ControllerError:
            if len(spec.learner_sizes) == 1:
                raise
            # Without room for the fewest, it waits for all of them again.
            num_workers = placeable_workers(spec) or spec.learner.num_workers
            what = f"the learner group goes on with {num_workers} of {spec.learner.num_workers} workers"
            actors.coordinator.record.remote("failure", {"what": what, "attempt": 1})
    if why := ray.get(actors.coordinator.gave_up.remote(), timeout=_VERDICT_TIMEOUT_S):
        raise LearnerFailedError(why)


def _trainer(spec: RunSpec, actors: RunActors, num_workers: int) -> Any:
    """Make Ray Train's trainer. It waits for resources for ever, or as long as the recipe says if it allows fewer
    workers, and then raises ControllerError."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from actors.training.trainer import NodeTorchConfig, Trainer

    is_elastic = len(spec.learner_sizes) > 1
    if is_elastic:
        # The controller reads it.
        os.environ[_START_TIMEOUT] = str(spec.learner.resource_timeout_s)
    backend = "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "gloo"
    # Passed untyped: Ray's annotations are those of Ray Train's first version, which had neither.
    labels: Any = {"label_selector": dict(spec.placement.learner_labels) or None}
    limits: Any = {"controller_failure_limit": 0 if is_elastic else -1}
    return Trainer(
        train_worker,
        train_loop_config={"spec": spec, "coordinator": actors.coordinator, "store": actors.store},
        torch_config=NodeTorchConfig(backend=backend, timeout_s=round(spec.collective_timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=spec.device == "cuda",
            resources_per_worker=learner_resources(spec.device, spec.gpus.learner_request),
            placement_strategy=spec.placement.learner,
            **labels,
        ),
        run_config=RunConfig(
            name=".ray_train",
            storage_path=str(spec.run_dir),
            failure_config=FailureConfig(max_failures=_MAX_LEARNER_RESTARTS, **limits),
        ),
    )


def train_worker(config: Mapping[str, Any]) -> None:
    """Run one learner worker; after a restart it resumes from the newest checkpoint."""
    # Imported here: driver and controller import this module too, and importing FSDP takes a second.
    from actors.training.training import TrainingRun

    spec, coordinator = config["spec"], config["coordinator"]
    ranks = Ranks(spec.collective_timeout_s)
    client = RunClient(coordinator, config["store"], spec.weight_transport)
    if (tokens := ranks.broadcast_decision(client.report_start)) is None:
        return
    PROGRESS.start(spec.collective_timeout_s, may_compile=bool(spec.sharding.compile))
    heartbeat = Heartbeat(coordinator, ranks.rank, ranks.size)
    try:
        TrainingRun(spec.with_micro_batches(tokens), client, heartbeat, ranks).run()
    except LeaderFailedError:
        raise  # Rank 0 reports the cause.
    except Exception as error:
        may_start_again = heartbeat.report(error, is_echo=is_peer_failure(error))
        # Other ranks may be blocked in a collective, which only the end of this process breaks. If the run gave up, the
        # next group then ends at its start.
        if may_start_again or ranks.size > 1:
            raise
    finally:
        heartbeat.end()
