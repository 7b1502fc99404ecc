"""A run, from the recipe to the last evaluation: what `d1 train` does and what a Ray job runs."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.run_log import DRIVER_LOG, METRICS, Event, RunLog, read_events
from actors.spec import Phase, RunSpec
from deploy.capacity.needs import checkpoint_bytes, needs_of
from deploy.errors import EXIT_RUN_FAILED, RunFailedError, UserError, user_errors
from deploy.interrupts import terminated_by_sigterm, wait_for_interrupt, wait_until_done
from deploy.job.following import checkpoint_on_stop, following
from deploy.job.judges import judge_servers
from deploy.job.mirroring import mirrored
from deploy.job.node_watch import node_processes, watching
from deploy.job.ray_output import redirect_native_output
from deploy.job.scaling import scaling
from deploy.job.watchdog import failure_message, watchdog
from deploy.orphans import adopt_orphans, kill_descendants
from deploy.printing import counted
from deploy.program import version_of
from deploy.ray_session import ray_session, registry_of_cluster
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.listing import point_latest_at
from deploy.runs.lock import RunLock
from deploy.runs.mirror import Mirror, mirror_for
from deploy.runs.run_directory import check_resumable, create_run_dir, make_spec
from deploy.service.source import Address, Source

if TYPE_CHECKING:
    from actors.cluster import RunActors

_CALL_TIMEOUT_S = 60.0
_NODE_ENDS_S = 3.0
# Part of Ray's message about a process that it killed to free memory, however often the error is wrapped.
_OUT_OF_MEMORY = "how to address the out of memory issue"


def run(
    recipe: Recipe,
    *,
    stages: Stages,
    start_from: Path | None,
    resume: bool,
    serve: bool,
    on_event: Callable[[Event], None],
) -> None:
    """Run the stages of a recipe on the cluster that RAY_ADDRESS names, or on a local Ray that it starts.

    Args:
        recipe: validated, and checked against the cluster.
        stages: which of them.
        start_from: a checkpoint directory that becomes policy version 0.
        resume: continue from the newest checkpoint of the run directory.
        serve: answer HTTP requests from the newest version while training; the service stays when the run ends.
        on_event: receives every event of the run log on a background thread, and the driver's own messages.

    Raises:
        UserError: the recipe cannot work, or there is nothing to resume.
        RunFailedError: an actor or the learner group failed for good, or the service did not come up; the run log says
            more.
        KeyboardInterrupt: after the run's actors, and its Ray if it started one, have ended.
    """
    began_at = time.time()
    spec = make_spec(recipe, stages)
    mirror = mirror_for(recipe, resume=resume)
    on_event(_waiting("reading the run directory" if resume else "making the run directory"))
    if resume:
        check_resumable(recipe, spec)

    def say(what: str) -> None:
        on_event(_waiting(what) | {"goes_on": True})

    with closing(RunLock.take(spec.run_dir) if resume else create_run_dir(recipe, spec, start_from, say)) as lock:
        if not lock.is_exclusive:
            what = f"the file system of {spec.run_dir} has no file locks: make sure that nothing else trains this run"
            on_event({"event": "status", "what": what})
        num_seen = len(read_events(spec.run_dir))
        if not resume:
            _record_start(recipe, stages, began_at)
        Driver(recipe=recipe, spec=spec, mirror=mirror, num_seen=num_seen, serve=serve, on_event=on_event).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """Driver of a run whose directory is locked by this process."""

    recipe: Recipe
    """The recipe."""
    spec: RunSpec
    """The run."""
    mirror: Mirror | None
    """Where its checkpoints are copied to; None: nowhere."""
    num_seen: int
    """Events of the run log that are not passed on: those of earlier attempts."""
    serve: bool
    """Whether a service answers requests meanwhile and afterwards."""
    on_event: Callable[[Event], None]
    """Receives the events."""

    def run(self) -> None:
        """Start or connect to Ray, and run the stages; see `run`."""
        spec = self.spec
        point_latest_at(spec.run_dir)
        adopt_orphans()
        self._wait_for("starting Ray" if "RAY_ADDRESS" not in os.environ else "connecting to Ray")
        with (
            redirect_native_output(spec.run_dir / DRIVER_LOG),
            watchdog(spec.run_dir, spec.name),
            ray_session(dashboard=True) as ray,
            # After Ray's start, which installs its own SIGTERM handler.
            terminated_by_sigterm(),
            watching(node_processes(), lambda name: self._end_with_node(f"{name} died", ray.logs_dir)),
        ):
            self.on_event({"event": "status", "what": f"Ray is up; dashboard http://{ray.dashboard_url}"})
            self._wait_for("starting the registry")
            has_judges = Phase.RL in spec.phases and spec.sampled_groups_per_round > 0
            with judge_servers(self.recipe.reward, spec.run_dir, self.on_event) if has_judges else nullcontext():
                self.run_on_ray(ray.dashboard_url, keep_store=self.serve and not ray.is_ours)
            if self.serve and ray.is_ours:
                wait_for_interrupt()

    def run_on_ray(self, dashboard_url: str, *, keep_store: bool) -> None:
        """Run the stages on the connected Ray. `keep_store` leaves the weight store to a service that outlives them."""
        from ray.exceptions import RayError
        from ray.train import TrainingFailedError

        from actors.cluster import LearnerFailedError, start_actors, stop_actors
        from actors.machines import machines_without, num_machines

        if blind := machines_without(self.spec.run_dir):
            raise UserError(
                f"the run directory {self.spec.run_dir} does not exist on {', '.join(blind)}: all machines of the "
                "cluster need it; take a runs_dir on a file system that they share"
            )
        url = registry_of_cluster()
        store_bytes = needs_of(self.recipe, num_machines=num_machines()).object_store_bytes
        # A run of the same name may be under way, with actors of the same names.
        with user_errors(ValueError):
            actors = start_actors(self.spec, self.recipe.grading.num_graders, url, secrets.token_hex(8), store_bytes)
        source = Source(directory=str(self.recipe.run_dir), is_run=True, registry_url=url)
        with ExitStack() as at_end:
            at_end.callback(stop_actors, actors, keep_store=keep_store)
            try:
                self._train(actors, source, dashboard_url)
            except (RayError, TrainingFailedError, LearnerFailedError, RunFailedError, TimeoutError) as error:
                # A raylet that receives SIGTERM ends its workers before itself: let `watching` name the raylet.
                time.sleep(_NODE_ENDS_S)
                cause = _dead_actor(actors) or _cause(error)
                at_end.close()
                run_dir = self.spec.run_dir
                where, known = f"the failures are in {run_dir / METRICS}", read_events(run_dir)[self.num_seen :]
                raise RunFailedError(failure_message(run_dir, self.spec.name, cause, where, known)) from error

    def _train(self, actors: RunActors, source: Source, dashboard_url: str) -> None:
        """Train with the run's actors, and start the service if there is one."""
        from actors.cluster import fit, wait_until_ready

        recipe, spec, coordinator = self.recipe, self.spec, actors.coordinator
        # Before the pools are up: they and the learner group take about as long to start, so they start in parallel.
        fitted = _in_thread(lambda: fit(spec, actors))
        pools = f"{counted(spec.rollout.num_samplers, 'sampler')} and {counted(recipe.grading.num_graders, 'grader')}"
        learners = counted(spec.learner.num_workers, "learner")
        self._wait_for(f"starting {pools}, and {learners}")

        def note_failure(what: str) -> None:
            coordinator.record.remote("failure", {"what": what, "attempt": 1})

        def scale_engines(num_replicas: int) -> None:
            from deploy.service.on_ray import launch

            launch.scale_engines(source, num_replicas, dashboard_url)

        with (
            mirrored(self.mirror, spec.run_dir, self.on_event, note_failure) as heard,
            following(coordinator, self.num_seen, heard),
            scaling(recipe, spec, actors, self.on_event, scale_engines if self.serve else None),
            checkpoint_on_stop(fitted, coordinator, self.on_event, checkpoint_bytes(recipe)),
        ):
            wait_until_ready(actors)
            if self.serve:
                self._start_service(source)
            self._wait_for(f"starting {learners}; the first evaluation follows")
            wait_until_done(fitted)
            fitted.result()
            _call(coordinator.finish.remote())

    def _start_service(self, source: Source) -> None:
        from deploy.service.on_ray.launch import banner, deploy_source

        self._wait_for("starting the service")
        service, share = self.recipe.service, self.recipe.gpus.engine
        address = Address(host=service.host, port=service.port)
        url = deploy_source(source, address, service.num_replicas, num_gpus=share, say=self._wait_for)
        self.on_event({"event": "status", "what": banner(self.recipe.run_dir, url)})

    def _end_with_node(self, what: str, logs_dir: Path) -> None:
        """Report what died, and end this process before Ray's native code does."""
        sentence = failure_message(self.spec.run_dir, self.spec.name, what, f"its logs are in {logs_dir}")
        self.on_event({"event": "lost", "what": sentence})
        kill_descendants()
        os._exit(EXIT_RUN_FAILED)

    def _wait_for(self, what: str) -> None:
        self.on_event(_waiting(what))


def _waiting(what: str) -> Event:
    """Build an event that says what the driver waits for: for display only, not for the run log."""
    return {"event": "waiting", "what": what}


def _dead_actor(actors: RunActors) -> str | None:
    """Name the dead actor among those that a run depends on, if any: other errors report that only in Ray's words."""
    from ray.exceptions import ActorDiedError, RayError

    for name, ask in (("the coordinator", actors.coordinator.gave_up), ("the weight store", actors.store.ready)):
        try:
            _call(ask.remote())
        except ActorDiedError:
            return f"{name} died"
        except RayError:
            continue
    return None


def _cause(error: Exception) -> str:
    """Extract the root cause in one line: Ray wraps it in the tracebacks of every process on the way."""
    from actors.cluster import LearnerFailedError

    if isinstance(error, LearnerFailedError | RunFailedError):
        return str(error)
    failures = getattr(error, "worker_failures", {})
    for failure in failures.values():
        error = getattr(failure, "cause", None) or failure
    if _OUT_OF_MEMORY in str(error):
        return "a machine ran out of memory and Ray killed a process of the run; end other programs or use fewer actors"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def _record_start(recipe: Recipe, stages: Stages, began_at: float) -> None:
    log = RunLog(recipe.run_dir)
    versions = {name: version_of(name) for name in ("d1", "ray", "torch", "transformers")}
    log.append(
        "run",
        name=recipe.name,
        seed=recipe.seed,
        stages=stages,
        began_at=began_at,
        commit=_git_commit(),
        hardware=f"{os.cpu_count()} cores, {platform.machine()}, {recipe.device}",
        versions=versions | {"python": platform.python_version()},
    )
    log.close()


def _git_commit() -> str:
    """Return the commit that d1 runs from, `+` marking local changes; `unknown` for an installed package."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],  # noqa: S607 - whichever git the user has
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread, so that Ctrl-C reaches us: in the main thread Ray Train handles the signal itself."""
    done: Future[None] = Future()

    def do() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=do, name="d1-fit", daemon=True).start()
    return done


def _call(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=_CALL_TIMEOUT_S)
