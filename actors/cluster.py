"""A run's actors on a Ray cluster: built, named, waited for, and ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import NAMESPACE, actor_name
from actors.coordination.coordinator import Coordinator
from actors.grader import GraderWorker
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
from learner.parallel.ranks import LeaderFailedError, Ranks, is_lost_peer

_START_TIMEOUT_S = 600.0
_VERDICT_TIMEOUT_S = 120.0
# The coordinator gives up long before, unless a group does not come to ask it.
_MAX_LEARNER_RESTARTS = 1000

WORKER_ENV = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What the processes of a run need in their environment: a brisk Ray Train controller, no look-ups at a hub, and one
thread for each of the processes that share a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunActors:
    """The handles of a run's actors."""

    coordinator: Any
    """The coordinator."""
    store: Any
    """The weight store; detached, for the service outlives the run."""
    pools: tuple[Any, ...]
    """Samplers and graders."""


class LearnerFailedError(Exception):
    """The learner group failed again and again; says of what."""


def start_actors(spec: RunSpec, num_graders: int, registry_url: str, driver: str) -> RunActors:
    """Ask Ray for the pools, the store and the coordinator; `wait_until_ready` says when they are there.

    Ray starts each of them again where it dies. `driver` names this attempt at the run.
    """
    restarted = {"max_restarts": -1, "max_task_retries": -1}
    store: Any = (
        watched(WeightStore)
        # An earlier try of the run may have left its store: it is taken over.
        .options(
            name=store_name(spec.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            **restarted,
            **store_resources(),
        )
        .remote(spec.learner.max_staleness + 2)
    )
    samplers = dict(start_sampler(spec, store, index) for index in range(spec.rollout.num_samplers))
    graders = dict(start_grader(spec, index) for index in range(num_graders))
    # A run of the name that is under way has its samplers, and has refused us by now: its store is left as it is.
    store.keep.remote(spec.learner.max_staleness + 2)
    # The run directory is written where the driver made it.
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


def start_sampler(spec: RunSpec, store: Any, index: int) -> tuple[str, Any]:
    """Ask Ray for the run's sampler `index`: its name among the run's actors, and its handle."""
    name = f"sampler {index}"
    sampler: Any = (
        watched(SamplerWorker)
        .options(
            name=actor_name(spec.name, name),
            max_restarts=-1,
            scheduling_strategy=spec.placement.samplers,
            **sampler_resources(spec.device, spec.gpus.asked_for_sampler),
        )
        .remote(
            spec.initial_checkpoint,
            read_from(store),
            spec.device,
            spec.rollout.engine,
            spec.gpus.sampler,
            is_asleep=spec.gpus.colocate,
        )
    )
    return name, sampler


def start_grader(spec: RunSpec, index: int) -> tuple[str, Any]:
    """The same for the run's grader `index`."""
    name = f"grader {index}"
    grader: Any = (
        watched(GraderWorker)
        .options(name=actor_name(spec.name, name), max_restarts=-1, **grader_resources())
        .remote(spec.task, spec.reward, spec.initial_checkpoint)
    )
    return name, grader


def watched(actor_class: type) -> Any:
    """An actor class whose `ready` is answered while another call is at work, as `Pools` and `Watch` ask it; and a
    sampler's `stage`."""
    remote: Any = ray.remote  # Its types do not know of the groups.
    return remote(concurrency_groups={"liveness": 1, "weights": 1})(actor_class)


def wait_until_ready(actors: RunActors) -> None:
    """Wait until every actor of a run answers.

    Raises:
        TimeoutError: the cluster did not place them all in time.
        ray.exceptions.RayError: one of them could not be made.
    """
    answers = [actor.ready.remote() for actor in actors.pools] + [actors.coordinator.events_since.remote(0)]
    try:
        ray.get(answers, timeout=_START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(
            f"the cluster did not start {len(actors.pools)} samplers and graders and the coordinator within "
            f"{_START_TIMEOUT_S:.0f} s; does it have room for them? --dry-run says"
        ) from error


def stop_actors(actors: RunActors, *, keep_store: bool) -> None:
    """End a run's actors; the store stays where a service still reads from it."""
    for actor in (
        *actors.pools,
        actors.coordinator,
        *(() if keep_store else (actors.store,)),
    ):
        ray.kill(actor)


def fit(spec: RunSpec, actors: RunActors) -> None:
    """Run the learner group to its end. Blocks.

    The group is started again as long as that leads somewhere, which the coordinator decides: not after so many faults,
    which a long run on many machines is bound to have.

    Raises LearnerFailedError where it leads nowhere, or who starts it again has died.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    from actors.training.trainer import Trainer

    backend = "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "gloo"
    trainer = Trainer(
        train_worker,
        train_loop_config={"spec": spec, "coordinator": actors.coordinator, "store": actors.store},
        torch_config=TorchConfig(backend=backend, timeout_s=round(spec.collective_timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=spec.learner.num_workers,
            use_gpu=spec.device == "cuda",
            resources_per_worker=learner_resources(spec.device, spec.gpus.asked_for_learner),
            placement_strategy=spec.placement.learner,
        ),
        run_config=RunConfig(
            name=".ray_train",
            storage_path=str(spec.run_dir),
            failure_config=FailureConfig(max_failures=_MAX_LEARNER_RESTARTS),
        ),
    )
    try:
        trainer.fit()
    except ActorDiedError as error:
        raise LearnerFailedError("Ray Train's controller died") from error
    if why := ray.get(actors.coordinator.gave_up.remote(), timeout=_VERDICT_TIMEOUT_S):
        raise LearnerFailedError(why)


def train_worker(config: Mapping[str, Any]) -> None:
    """What each learner worker runs; after a restart it goes on from the newest checkpoint."""
    # Driver and controller import this module too, and FSDP takes a second.
    from actors.training.training import TrainingRun

    spec, coordinator = config["spec"], config["coordinator"]
    ranks = Ranks(spec.collective_timeout_s)
    client = RunClient(coordinator, config["store"], spec.weight_transport)
    if (tokens := ranks.agreed(client.starting)) is None:
        return
    heartbeat = Heartbeat(coordinator, ranks.rank)
    try:
        TrainingRun(spec.with_micro_batches(tokens), client, heartbeat, ranks).run()
    except LeaderFailedError:
        raise  # Rank 0 says why.
    except Exception as error:
        may_start_again = heartbeat.report(error, is_echo=is_lost_peer(error))
        # Others may wait for this rank in a collective, which only its end breaks: then the next group is told.
        if may_start_again or ranks.size > 1:
            raise
    finally:
        heartbeat.end()
